/* Attention of q rows over committed pages and a window under an ancestor mask; see `AttentionMetadata` in batch.py.
 *
 * A row sees one cell for each position up to its own. Sums go over blocks of BLOCK positions from 0 on, and the blocks
 * are merged in order. So the bits of a row depend only on the cells that it sees, not on the tree, the batch or the
 * number of threads, and a row of a tree has the same bits as in plain decoding.
 *
 * A line is one query head of one row. A task is the lines of some rows that share a KV head, so their cells are read
 * once.
 */
#include "../c/threads.h"
#include "block.h"
#include <stdlib.h>

/* Stores a new cell as FP8 codes, and returns 0. If a number is not finite or its magnitude is above MOST, stores zeros
 * and returns 1.
 */
static int store_coded(const struct aerie_attend *a, const stored *from, uint8_t *to)
{
    uint8_t *scales = to + a->cell;
    memset(scales, 0, a->coded - a->cell);
    for (int64_t i = 0, group = 0, some; i < a->cell; group++, i += some) {
        /* A latent has two groups: the value, and the rotated key. */
        some = a->latent ? (group ? a->cell - i : a->value) : i < a->values ? a->size : a->value;
        pattern most = greatest(from + i, some);
        if (most > MOST) {
            memset(to, 0, a->coded);
            return 1;
        }
        scales[group] = scale_of(most);
        encode(to + i, from + i, some, scales[group]);
    }
    return 0;
}

/* Stores a new cell as it is. If a number is not finite (then x * 0 is NaN), stores zeros and returns nonzero. */
static int store_plain(const stored *from, stored *to, int64_t count)
{
    int64_t even = count / EACH * EACH;
    vec zero = {0};
    real rest = 0;
    for (int64_t i = 0; i < even; i += EACH) zero += load(from + i) * 0;
    for (int64_t i = 0; i < EACH; i++) rest += zero[i];
    for (int64_t i = even; i < count; i++) rest += get(from + i) * 0;
    if (rest != 0)
        memset(to, 0, count * sizeof *to);
    else
        memcpy(to, from, count * sizeof *to);
    return rest != 0;
}

/* Stores new cells to the pool, and marks in `bad` the rows whose cells are not finite. Several padding rows may write
 * the same slot of the sink page (page 0). Part 0 stores the cells of all rows that write to this page, so that
 * always the last row wins.
 */
static void store_part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    const struct aerie_attend *a = j->a;
    int64_t first = a->rows * part / parts, last = a->rows * (part + 1) / parts;
    for (int64_t t = part ? first : 0; t < (part ? last : a->rows); t++) {
        int64_t page = own_page(a, a->write[t] / a->page_size), slot = page * a->page_size + a->write[t] % a->page_size;
        if (slot < a->page_size ? part != 0 : t >= last) continue;
        const stored *from = a->kv + t * a->kv_stride;
        j->bad[t] = a->coded ? store_coded(a, from, (uint8_t *)a->memory + slot * a->coded)
                             : store_plain(from, (stored *)a->memory + slot * a->cell, a->cell);
    }
}

/* Adds the next block to the online softmax of a line: values, highest score, sum of exponentials. */
INLINE void merge(real *values, real *highest, real *total, const real *more, real most, real sum, int64_t wide)
{
    if (sum == 0) return;
    real top = most > *highest ? most : *highest;
    real old = exponential_of(*highest - top), new = exponential_of(most - top);
    for (int64_t d = 0; d < wide; d += EACH) {
        vec x = *(loose *)(values + d) * old;
        *(loose *)(values + d) = x + *(const loose *)(more + d) * new;
    }
    *total = *total * old + sum * new;
    *highest = top;
}

INLINE void give(const struct job *j, const struct task *t, int64_t line, const real *values, real highest, real total)
{
    const struct aerie_attend *a = j->a;
    int64_t row = t->row + line / j->repeat, head = t->head * j->repeat + line % j->repeat;
    stored *out = a->out + (row * a->heads + head) * a->value;
    real grown = 1;
    if (a->sinks) {
        real sink = get(a->sinks + head), top = sink > highest ? sink : highest;
        grown = exponential_of(highest - top);
        total = total * grown + exponential_of(sink - top);
    }
    real factor = j->bad[row] ? (real)NAN : total == 0 ? 0 : grown / total;
    for (int64_t d = 0; d < a->value; d++) put(out + d, values[d] * factor);
}

static void attended(const struct job *j, const struct task *t)
{
    const struct aerie_attend *a = j->a;
    int64_t lines = t->count * j->repeat, first = t->begin / BLOCK, blocks = (t->end + BLOCK - 1) / BLOCK - first;
    int64_t line = j->wide + 2, each = lines * (j->deep + 2 * line);
    real *q = aerie_scratch(0, sizeof(real) * each), *values = q + lines * j->deep, *own = values + lines * line;
    for (int64_t l = 0; l < lines; l++)
        widened_to(q + l * j->deep, a->q + (t->row + l / j->repeat) * a->q_stride + (t->head * j->repeat + l % j->repeat) * a->size,
                   a->size, j->deep);
    real *highest = own + lines * j->wide, *total = highest + lines;
    for (int64_t i = 0; i < lines * line; i++) own[i] = 0;
    for (int64_t l = 0; l < lines; l++) highest[l] = -(real)INFINITY;
    int64_t from = blocks * t->split / t->splits, to = blocks * (t->split + 1) / t->splits;
    for (int64_t b = from; b < to; b++) {
        real *part = t->splits > 1 ? j->partials + (t->partial + b * lines) * line : values;
        block(j, t, first + b, q, part, part + lines * j->wide, part + lines * (j->wide + 1));
        for (int64_t l = 0; t->splits == 1 && l < lines; l++)
            merge(own + l * j->wide, highest + l, total + l, part + l * j->wide, part[lines * j->wide + l],
                  part[lines * (j->wide + 1) + l], j->wide);
    }
    for (int64_t l = 0; t->splits == 1 && l < lines; l++) give(j, t, l, own + l * j->wide, highest[l], total[l]);
}

/* Merges the partial results of a task that was split, block by block in order, as one thread would have. */
static void joined(const struct job *j, const struct task *t)
{
    int64_t lines = t->count * j->repeat, line = j->wide + 2;
    int64_t blocks = (t->end + BLOCK - 1) / BLOCK - t->begin / BLOCK;
    real *own = aerie_scratch(0, sizeof(real) * j->wide);
    for (int64_t l = 0; l < lines; l++) {
        real highest = -(real)INFINITY, total = 0;
        memset(own, 0, sizeof(real) * j->wide);
        for (int64_t b = 0; b < blocks; b++) {
            const real *part = j->partials + (t->partial + b * lines) * line;
            merge(own, &highest, &total, part + l * j->wide, part[lines * j->wide + l], part[lines * (j->wide + 1) + l],
                  j->wide);
        }
        give(j, t, l, own, highest, total);
    }
}

/* Work stealing: a thread first takes its own tasks. They belong to the rows that the thread also computes in other
 * kernels, so the data of these rows are in its cache. Then it takes the remaining tasks of other threads.
 */
static void attend_part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    for (int64_t i = 0; i < parts; i++) {
        int64_t whose = (part + i) % parts, begin = j->count * whose / parts, some = j->count * (whose + 1) / parts - begin;
        int64_t *taken = &j->turns[whose].taken;
        for (int64_t at; (at = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < some;) attended(j, j->tasks + begin + at);
    }
}

static void join_part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    for (int64_t at = part; at < j->count; at += parts)
        if (j->tasks[at].splits > 1 && j->tasks[at].split == 0) joined(j, j->tasks + at);
}

/* Splits `whole` into tasks of at most `most` rows for one KV head each, and writes them to `tasks` from index `at` on.
 * Returns the index after the last task.
 */
static int64_t add(const struct aerie_attend *a, struct task *tasks, int64_t at, struct task whole, int64_t most)
{
    for (int64_t row = 0; row < whole.count; row += most) {
        struct task t = whole;
        t.row += row, t.count = smaller(most, whole.count - row);
        if (t.bits)
            t.bits += row * a->words;
        else
            t.start += row;
        int64_t last = 0;
        t.begin = INT64_MAX;
        for (int64_t r = 0; r < t.count; r++) {
            int64_t own = position_of(&t, a, r);
            t.begin = smaller(t.begin, lowest_of(a, own)), last = larger(last, own);
        }
        t.end = last + 1;
        for (t.head = 0; t.head < a->kv_heads; t.head++) tasks[at++] = t;
    }
    return at;
}

/* The number of consecutive entries of the tree, from `i` on, that are single rows of one request. They form one task, so
 * that their cells are read once.
 */
static int64_t same_request(const struct aerie_attend *a, int64_t i)
{
    int64_t count = 1;
    if (a->each != 1 || a->bits_stride != a->words) return 1;
    while (i + count < a->requests && a->tree_rows[i + count] == a->tree_rows[i] && a->tree_lens[i + count] == a->tree_lens[i])
        count++;
    return count;
}

void NAMED(aerie_attend)(const struct aerie_attend *a)
{
    int64_t repeat = a->heads / a->kv_heads, tile = larger(1, TILE / repeat), most = larger(1, 4 * TILE / repeat), room = 0;
    room = a->requests * ((a->each + most - 1) / most);
    for (int64_t i = 0; i < a->chunks; i++) room += (a->indptr[i + 1] - a->indptr[i] + tile - 1) / tile;
    room *= a->kv_heads;
    uint8_t *bad = calloc(1, a->rows + 1);
    struct task *tasks = malloc(sizeof *tasks * (room + 1) * (a->threads + 1));
    struct turns *turns = calloc(sizeof *turns, a->threads + 1);
    if (!bad || !tasks || !turns) abort();
    int64_t count = 0, text = a->requests * a->each;
    for (int64_t i = 0, same; i < a->requests; i += same) {
        same = same_request(a, i);
        struct task t = {.table = a->tree_rows[i], .start = a->tree_lens[i], .row = i * a->each, .count = same * a->each,
                         .bits = a->bits + i * a->bits_stride, .splits = 1};
        count = add(a, tasks, count, t, most);
    }
    for (int64_t i = 0; i < a->chunks; i++) {
        struct task t = {.table = a->text_rows[i], .start = a->text_starts[i], .row = text + a->indptr[i],
                         .count = a->indptr[i + 1] - a->indptr[i], .splits = 1};
        count = add(a, tasks, count, t, tile);
    }
    struct job j = {.a = a, .tasks = tasks, .turns = turns, .bad = bad, .count = count, .repeat = repeat,
                    .deep = up(a->size, LANES), .wide = up(a->value, LANES)};
    int64_t enough = 1 + a->rows * a->cell / 8192;
    if (a->kv) aerie_spread(store_part, &j, larger(1, smaller(a->threads, enough)));
    int64_t kept = 0;
    if (count && count < a->threads) { /* fewer tasks than threads: split long tasks by blocks */
        int64_t whole = count, splits = (a->threads + count - 1) / count;
        for (int64_t i = 0; i < whole; i++) {
            struct task *t = tasks + i;
            int64_t blocks = (t->end + BLOCK - 1) / BLOCK - t->begin / BLOCK;
            t->splits = larger(1, smaller(splits, blocks / 2));
            if (t->splits == 1) continue;
            t->partial = kept;
            kept += blocks * t->count * repeat;
            for (int64_t s = 1; s < t->splits; s++) tasks[count] = *t, tasks[count++].split = s;
        }
        j.count = count;
    }
    if (kept) j.partials = malloc(sizeof(real) * kept * (j.wide + 2));
    if (kept && !j.partials) abort();
    int64_t threads = smaller(a->threads, count);
    aerie_spread(attend_part, &j, larger(1, threads));
    if (kept) {
        aerie_spread(join_part, &j, larger(1, threads));
        free(j.partials);
    }
    int64_t covered = text + (a->chunks ? a->indptr[a->chunks] : 0);
    if (covered < a->rows)
        memset(a->out + covered * a->heads * a->value, 0, sizeof(stored) * (a->rows - covered) * a->heads * a->value);
    free(turns);
    free(tasks);
    free(bad);
}
