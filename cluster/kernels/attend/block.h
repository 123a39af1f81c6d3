/* The arguments of attention, its tasks, and the computation of one block of positions of a task. */
#pragma once
#include "../c/scratch.h"
#include "coded.h"

#define BLOCK 512
#define TILE 64  /* lines of a prompt's task */
#define SOME 16  /* cells that are handled together, so that their copies stay in the L1 cache */
#define AHEAD 128 /* a cell is prefetched this many cells before its use */

struct aerie_attend {
    void *memory; /* one layer: [slots, cell] numbers, or [slots, coded] bytes */
    const stored *q, *kv, *sinks; /* `kv` NULL: the new cells are in `memory` already */
    stored *out;
    const int64_t *write;
    const int32_t *pages, *window_pages; /* `window_pages` maps pages to those of `memory`; NULL: to themselves */
    const int64_t *tree_rows, *tree_lens;
    const int32_t *bits;
    const int64_t *text_rows, *text_starts, *indptr;
    /* A cell has `cell` numbers: a key of `size` numbers for each KV head, and from number `values` on a value of `value`
     * numbers for each. A cell that is a latent (`latent`) is one key, whose first `value` numbers are its value.
     */
    int64_t rows, q_stride, kv_stride, heads, kv_heads, size, value, cell, values, latent;
    int64_t pages_each, page_size;
    int64_t requests, each, words, bits_stride;
    int64_t chunks, first, window, threads;
    int64_t coded; /* bytes of a cell in FP8; 0: cells are numbers */
    double scale;
};

/* Some rows of one request, for one kv head. */
struct task {
    /* `table` is the request's row in the page table. In a tree, `start` is the number of committed tokens; in a
     * prompt, it is the position of the task's first row.
     */
    int64_t table, start;
    int64_t row, count;    /* the first batch row; the number of rows */
    const int32_t *bits;   /* ancestor bits of the first row; NULL: a prompt, in which row i is at start + i */
    int64_t head;          /* KV head */
    int64_t begin, end;    /* each row sees only positions `begin` to `end` - 1 */
    int64_t split, splits; /* this task has part `split` of `splits` of the blocks */
    int64_t partial;       /* if splits > 1: where its partial results begin, in lines */
};

/* The number of a thread's tasks that were taken. Padded to a cache line, so that threads do not share one. */
struct turns {
    int64_t taken;
    char apart[56];
};

struct job {
    const struct aerie_attend *a;
    const struct task *tasks;
    struct turns *turns; /* of each thread */
    uint8_t *bad;        /* marks rows whose cells are not finite */
    real *partials;     /* for each line and block: values, highest score, sum */
    /* Number of tasks; query heads of a KV head; `size` and `value`, rounded up to multiples of LANES. */
    int64_t count, repeat, deep, wide;
};

INLINE int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* The page of `memory` that belongs to `page`. */
INLINE int64_t own_page(const struct aerie_attend *a, int64_t page)
{
    return a->window_pages ? a->window_pages[page] : page;
}

INLINE int64_t slot_of(const struct aerie_attend *a, int64_t table, int64_t position)
{
    position = smaller(position, a->pages_each * a->page_size - 1);
    int64_t page = own_page(a, a->pages[table * a->pages_each + position / a->page_size]);
    return page * a->page_size + position % a->page_size;
}

INLINE void widened_to(real *to, const stored *from, int64_t size, int64_t whole)
{
    int64_t i = 0;
    for (; i + EACH <= size; i += EACH) *(loose *)(to + i) = load(from + i);
    for (; i < size; i++) to[i] = get(from + i);
    for (; i < whole; i++) to[i] = 0;
}

enum { KEY, VALUE };

/* Where the key or the value of a KV head begins in a cell. */
INLINE int64_t offset_in_cell(const struct aerie_attend *a, int which, int64_t head)
{
    return which == KEY ? head * a->size : a->values + head * a->value;
}

/* Decodes a key or a value of an FP8 cell to `to`. In a latent, the rotated key after the first `value` numbers has its
 * own scale.
 */
INLINE void decoded_to(const struct job *j, int which, int64_t slot, int64_t head, real *to)
{
    const struct aerie_attend *a = j->a;
    const uint8_t *cell = (const uint8_t *)a->memory + slot * a->coded, *scales = cell + a->cell;
    if (a->latent && which == KEY) {
        decode(to, cell, a->value, a->value, scales[0]);
        decode(to + a->value, cell + a->value, a->size - a->value, j->deep - a->value, scales[1]);
        return;
    }
    int64_t group = a->latent ? 0 : which * a->kv_heads + head, count = which == KEY ? a->size : a->value;
    decode(to, cell + offset_in_cell(a, which, head), count, which == KEY ? j->deep : j->wide, scales[group]);
}

/* Returns whether cells can be used in place: they are stored as `real`, and their size is a multiple of LANES. If not,
 * they are copied to that form.
 */
INLINE int in_place(const struct job *j)
{
    return KIND != 16 && !j->a->coded && j->a->size == j->deep && j->a->value == j->wide;
}

/* Returns the key or the value of a cell, in place or in `copy`, which has room for either. */
INLINE const real *placed(const struct job *j, int which, int64_t slot, int64_t head, real *copy)
{
    const struct aerie_attend *a = j->a;
    if (a->coded) {
        decoded_to(j, which, slot, head, copy);
        return copy;
    }
    const stored *from = (const stored *)a->memory + slot * a->cell + offset_in_cell(a, which, head);
#if KIND != 16
    if (in_place(j)) return from;
#endif
    widened_to(copy, from, which == KEY ? a->size : a->value, which == KEY ? j->deep : j->wide);
    return copy;
}

/* Prefetches the keys or values of positions `p` to `stop` - 1 into the L2 cache: cells are too far apart for the CPU's
 * own prefetcher. Inlined, since GCC removes calls of a function that only prefetches.
 */
INLINE void asked(const struct job *j, const struct task *t, int which, int64_t p, int64_t stop)
{
    const struct aerie_attend *a = j->a;
    int64_t each = a->coded ? 1 : sizeof(stored), count = a->cell * each, page = a->page_size;
    int64_t bytes = (which == KEY ? a->size : a->value) * each, cell = a->coded ? a->coded : count;
    for (int64_t slot = 0, left = 0; p < stop; p++, slot++, left--) {
        if (!left) slot = slot_of(a, t->table, p), left = page - p % page;
        const char *from = (const char *)a->memory + slot * cell + offset_in_cell(a, which, t->head) * each;
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
        if (a->coded && which == KEY) __builtin_prefetch((const char *)a->memory + slot * cell + count, 0, 2);
    }
}

/* Sets at[i] to the key or value of position p + i, for `count` positions. The cells of a page are adjacent. */
static void placed_run(const struct job *j, const struct task *t, int which, int64_t p, int64_t count, const real **at,
                       real *copies)
{
    const struct aerie_attend *a = j->a;
    int64_t each = larger(j->deep, j->wide), page = a->page_size, cell = a->cell;
    for (int64_t i = 0; i < count;) {
        int64_t slot = slot_of(a, t->table, p + i), stop = smaller(count, i + page - (p + i) % page);
#if KIND != 16
        if (in_place(j)) {
            const stored *from = placed(j, which, slot, t->head, NULL);
            for (; i < stop; i++, from += cell) at[i] = from;
            continue;
        }
#endif
        for (; i < stop; i++, slot++) at[i] = placed(j, which, slot, t->head, copies + i * each);
    }
}

INLINE int64_t shared_by(const struct task *t) { return t->bits ? t->start : t->end; }

/* Prefetches `n` cells while cells `p` to `p` + `n` - 1 are used: the cells AHEAD positions later or, near the end of
 * the task, the first cells of the next task. So there are always memory requests under way, but never too many.
 */
INLINE void asked_ahead(const struct job *j, const struct task *t, int which, int64_t p, int64_t n)
{
    if (which == VALUE && j->a->latent) return; /* a latent is key and value, so its keys have been prefetched */
    int64_t end = shared_by(t), from = p + smaller(AHEAD, end - t->begin), to = from + n, past = to - end;
    if (from < end) asked(j, t, which, from, smaller(to, end));
    if (past <= 0 || t->splits > 1 || t + 1 == j->tasks + j->count) return;
    int64_t begin = t[1].begin + larger(from - end, 0);
    asked(j, t + 1, which, begin, smaller(t[1].begin + past, shared_by(t + 1)));
}

/* scores[line][cell] = scale * (q[line] . key[cell]) of `ls` lines and `cs` cells, each a sum of LANES lanes. */
INLINE void products(int ls, int cs, const real *q, int64_t deep, const real *const *key, real scale, real *scores)
{
    lanes sum[4 * 4];
    for (int i = 0; i < ls * cs; i++) sum[i] = (lanes){{{0}}};
    for (int64_t d = 0; d < deep; d += LANES)
        for (int f = 0; f < FOLDS; f++) {
            vec k[4];
            for (int c = 0; c < cs; c++) k[c] = *(const loose *)(key[c] + d + f * EACH);
            for (int l = 0; l < ls; l++) {
                vec x = *(const loose *)(q + l * deep + d + f * EACH);
                for (int c = 0; c < cs; c++) sum[l * cs + c].part[f] += x * k[c];
            }
        }
#ifdef DENSE
    if (ls == 4 && cs == 4) {
        vec x[4][4];
        for (int i = 0; i < 16; i++) x[i / 4][i % 4] = sum[i].part[0];
        vec s = sixteen_summed(x) * scale;
        for (int l = 0; l < 4; l++) memcpy(scores + l * BLOCK, (const real *)&s + 4 * l, 4 * sizeof(real));
        return;
    }
#endif
    for (int l = 0; l < ls; l++)
        for (int c = 0; c < cs; c += SUMS) {
            if (cs >= SUMS) {
                few s = all_summed(sum + l * cs + c) * scale;
                memcpy(scores + l * BLOCK + c, &s, sizeof s);
            } else
                for (int i = 0; i < cs; i++) scores[l * BLOCK + i] = summed(sum[l * cs + i]) * scale;
        }
}

#if BYTES == 64
#define LINES 4
#else
#define LINES 1
#endif

static void score(const real *q, int64_t lines, int64_t deep, const real *const *key, int64_t count, real scale,
                  real *scores)
{
    int64_t c = 0;
    for (; c + 4 <= count; c += 4) {
        int64_t l = 0;
        for (; l + LINES <= lines; l += LINES) products(LINES, 4, q + l * deep, deep, key + c, scale, scores + l * BLOCK + c);
        for (; l < lines; l++) products(1, 4, q + l * deep, deep, key + c, scale, scores + l * BLOCK + c);
    }
    for (; c < count; c++)
        for (int64_t l = 0; l < lines; l++) products(1, 1, q + l * deep, deep, key + c, scale, scores + l * BLOCK + c);
}

/* out[line] += weight[line][cell] * value[cell], cell after cell. */
INLINE void weighted(int ls, int vs, const real *weight, const real *const *value, int64_t count, real *out, int64_t wide)
{
    vec sum[4][4];
    for (int l = 0; l < ls; l++)
        for (int v = 0; v < vs; v++) sum[l][v] = *(const loose *)(out + l * wide + v * EACH);
    for (int64_t c = 0; c < count; c++) {
        vec x[4];
        for (int v = 0; v < vs; v++) x[v] = *(const loose *)(value[c] + v * EACH);
        for (int l = 0; l < ls; l++) {
            vec w = all(weight[l * BLOCK + c]);
            for (int v = 0; v < vs; v++) sum[l][v] += w * x[v];
        }
    }
    for (int l = 0; l < ls; l++)
        for (int v = 0; v < vs; v++) *(loose *)(out + l * wide + v * EACH) = sum[l][v];
}

static void weigh(const real *weight, int64_t lines, const real *const *value, int64_t count, real *out, int64_t wide)
{
    const real *from[BLOCK];
    for (int64_t d = 0, vs; d < wide; d += vs * EACH) {
        vs = wide - d >= 4 * EACH ? 4 : 1;
        for (int64_t c = 0; c < count; c++) from[c] = value[c] + d;
        int64_t l = 0;
        for (; l + LINES <= lines; l += LINES) {
            if (vs == 4)
                weighted(LINES, 4, weight + l * BLOCK, from, count, out + l * wide + d, wide);
            else
                weighted(LINES, 1, weight + l * BLOCK, from, count, out + l * wide + d, wide);
        }
        for (; l < lines; l++) {
            if (vs == 4)
                weighted(1, 4, weight + l * BLOCK, from, count, out + l * wide + d, wide);
            else
                weighted(1, 1, weight + l * BLOCK, from, count, out + l * wide + d, wide);
        }
    }
}

INLINE int64_t position_of(const struct task *t, const struct aerie_attend *a, int64_t row)
{
    if (!t->bits) return t->start + row;
    int64_t seen = 0;
    for (int64_t w = 0; w < a->words; w++) seen += __builtin_popcount((uint32_t)t->bits[row * a->words + w]);
    return t->start + seen - 1;
}

INLINE int64_t lowest_of(const struct aerie_attend *a, int64_t own)
{
    /* A negative window is the size of a chunk: a row sees the tokens of its own chunk. */
    int64_t low = a->window > 0 ? larger(0, own - a->window + 1) : a->window ? own - own % a->window : 0;
    return a->first && own >= a->first ? larger(low, a->first) : low;
}

/* Turns a line's scores into weights exp(score - highest), in place, for positions `low` to `high` - 1 of the block.
 * The others get 0.
 */
INLINE void softmax(real *scores, int64_t low, int64_t high, real *highest, real *total)
{
    int64_t end = up(high, LANES);
    for (int64_t i = 0; i < low; i++) scores[i] = -(real)INFINITY;
    for (int64_t i = high; i < end; i++) scores[i] = -(real)INFINITY;
    vec top = all(-(real)INFINITY);
    for (int64_t i = 0; i < end; i += EACH) {
        vec x = *(const loose *)(scores + i);
        ints more = x > top;
        top = (vec)(((ints)x & more) | ((ints)top & ~more));
    }
    real most = top[0];
    for (int i = 1; i < EACH; i++) most = top[i] > most ? top[i] : most;
    lanes sum = {{{0}}};
    for (int64_t i = 0; i < end; i += LANES)
        for (int f = 0; f < FOLDS; f++) {
            loose *at = (loose *)(scores + i + f * EACH);
            vec x = exponential((vec)*at - most);
            *at = x;
            sum.part[f] += x;
        }
    *highest = most;
    *total = summed(sum);
}

/* Sets at[0], at[1], ... to the keys or values of a tree row's ancestors at positions `from` to `high` - 1. The k-th
 * ancestor in the window is at position start + k, wherever its slot is: ancestors need not be in adjacent slots.
 */
static void placed_window(const struct job *j, const struct task *t, int which, int64_t row, int64_t from, int64_t high,
                          const real **at, real *copies)
{
    const struct aerie_attend *a = j->a;
    int64_t seen = t->start, each = larger(j->deep, j->wide);
    for (int64_t w = 0; w < a->words; w++)
        for (uint32_t left = (uint32_t)t->bits[row * a->words + w]; left; left &= left - 1, seen++) {
            if (seen < from || seen >= high) continue;
            int64_t slot = slot_of(a, t->table, t->start + w * 32 + __builtin_ctz(left));
            at[seen - from] = placed(j, which, slot, t->head, copies + (seen - from) * each);
        }
}

/* Computes one block of positions for a task's lines: values [lines, wide], highest and total [lines]. A line that sees
 * nothing in the block gets total 0. First the cells that all rows share are scored for all rows together: in a tree
 * the cells before the window, in a prompt all cells. Then each row's ancestors in the window are scored.
 */
static void block(const struct job *j, const struct task *t, int64_t number, const real *q, real *values, real *highest,
                  real *total)
{
    const struct aerie_attend *a = j->a;
    int64_t base = number * BLOCK, stop = base + BLOCK, lines = t->count * j->repeat;
    int64_t begin = larger(base, t->begin), shared = smaller(stop, shared_by(t));
    const real **at = aerie_scratch(1, (sizeof *at + sizeof(real) * larger(j->deep, j->wide)) * BLOCK);
    real *copies = (real *)(at + BLOCK);
    real *scores = aerie_scratch(2, sizeof(real) * lines * BLOCK), scale = (real)a->scale;
    for (int64_t p = begin, n; p < shared; p += n) {
        n = smaller(SOME, shared - p);
        placed_run(j, t, KEY, p, n, at, copies);
        for (int64_t c = 0; c < n; c += 4) {
            asked_ahead(j, t, KEY, p + c, smaller(4, n - c));
            score(q, lines, j->deep, at + c, smaller(4, n - c), scale, scores + (p + c - base));
        }
    }
    memset(values, 0, sizeof(real) * lines * j->wide);
    for (int64_t r = 0; r < t->count; r++) {
        int64_t own = position_of(t, a, r), low = larger(lowest_of(a, own), base), high = smaller(own + 1, stop);
        int64_t line = r * j->repeat, from = larger(larger(base, t->start), low);
        real *score_of = scores + line * BLOCK;
        if (t->bits && from < high) {
            placed_window(j, t, KEY, r, from, high, at, copies);
            score(q + line * j->deep, j->repeat, j->deep, at, high - from, scale, score_of + (from - base));
        }
        for (int64_t l = 0; l < j->repeat; l++, score_of += BLOCK) {
            total[line + l] = 0;
            if (low < high) softmax(score_of, low - base, high - base, highest + line + l, total + line + l);
            for (int64_t i = low < high ? high - base : 0; i < shared - base; i++) score_of[i] = 0;
        }
    }
    for (int64_t p = begin, n; p < shared; p += n) {
        n = smaller(SOME, shared - p);
        asked_ahead(j, t, VALUE, p, n);
        placed_run(j, t, VALUE, p, n, at, copies);
        weigh(scores + (p - base), lines, at, n, values, j->wide);
    }
    for (int64_t r = 0; t->bits && r < t->count; r++) {
        int64_t own = position_of(t, a, r), high = smaller(own + 1, stop), line = r * j->repeat;
        int64_t from = larger(larger(base, t->start), lowest_of(a, own));
        if (from >= high) continue;
        placed_window(j, t, VALUE, r, from, high, at, copies);
        weigh(scores + line * BLOCK + (from - base), j->repeat, at, high - from, values + line * j->wide, j->wide);
    }
}
