/* out[m][n] = sum over groups of inputs of scale[group][n] * (sum over k of the group of rows[m][k] * (code[k][n] - zero)),
 * + bias[n]. Both sums are chains in ascending order, whatever is computed beside them.
 *
 * Codes, scales and zeros lie in panels of LANES columns: scales[panel][group][LANES], zeros likewise, codes
 * [panel][k][LANES], or [panel][k / 2][LANES] where two inputs share a byte, or words [panel][k / 8][LANES].
 */
#include "../c/scratch.h"
#include "../c/threads.h"
#include "unpack.h"

#define MOST 6 /* rows of a tile */
#define TALL (MOST * 4)

struct job {
    const stored *rows;
    const uint8_t *codes;
    const void *scales;
    const uint8_t *zeros; /* NULL: half of the range */
    const stored *bias;
    stored *out;
    int64_t m, k, n, group;
    int kind, wide;
    const int32_t *ends; /* of each expert's rows; NULL: there is one matrix */
    int64_t experts;
    int64_t steps, groups, panels; /* steps and groups of a panel, panels of a matrix */
};

struct tile {
    const real *rows; /* [k][mr] */
    int64_t panel;    /* the first, counted over all experts */
    const stored *bias;
    stored *out;
    int64_t columns; /* from the first panel's to the last of the matrix */
};

/* Inputs of a step, and bytes that it takes of a column. */
INLINE int inputs_of(int kind) { return kind == INT4 ? 8 : kind == FP4 ? 2 : 1; }
INLINE int bytes_of(int kind) { return kind == INT4 ? 4 : 1; }

INLINE void finish(const struct job *j, const struct tile *t, int row, int64_t column, vec x)
{
    stored *out = t->out + row * j->n + column;
    if (column + EACH <= t->columns) {
        save(out, t->bias ? x + load(t->bias + column) : x);
        return;
    }
    for (int i = 0; i < EACH && column + i < t->columns; i++)
        put(out + i, t->bias ? x[i] + get(t->bias + column + i) : x[i]);
}

/* The group's products of one input: of the tile's rows, at `x`, and the panels' numbers. */
#define ADDED(x, numbers_of_panel)                                                                 \
    for (int p = 0; p < np; p++) {                                                                 \
        numbers weight = numbers_of_panel;                                                         \
        for (int m = 0; m < mr; m++)                                                               \
            for (int f = 0; f < FOLDS; f++) sum[m][p * FOLDS + f] += all((x)[m]) * weight.part[f]; \
    }

/* The sums of one group of `inputs`, whose steps are at `codes`, `panel` bytes from one panel to the next. */
INLINE void group_of(const real *x, const uint8_t *codes, int64_t panel, const uint8_t *zeros, int64_t zeros_panel,
                     int64_t inputs, int kind, int mr, int np, vec sum[MOST][4 * FOLDS])
{
    const int each = inputs_of(kind);
    integers zero[4];
    for (int p = 0; p < np; p++) zero[p] = widened(zeros ? octets_at(zeros + p * zeros_panel) : same(8));
    if (kind == INT4) {
        numbers less[4][PLACES];
        integers words[4];
        for (int p = 0; p < np; p++)
            for (int i = 0; i < PLACES; i++)
                for (int f = 0; f < FOLDS; f++) less[p][i].part[f] = place_of(i) + real_of(zero[p]).part[f];
        for (; inputs >= 8; inputs -= 8, codes += 4 * LANES, x += 8 * mr) {
            for (int p = 0; p < np; p++) words[p] = words_at(codes + p * panel);
            for (int i = 0; i < PLACES; i++) ADDED(x + i * mr, at_place(words[p], i, &less[p][i]))
            for (int p = 0; p < np; p++)
                for (int f = 0; f < FOLDS; f++) words[p].part[f] >>= 16;
            for (int i = 0; i < PLACES; i++) ADDED(x + (PLACES + i) * mr, at_place(words[p], i, &less[p][i]))
        }
        for (int p = 0; p < np && inputs; p++) words[p] = words_at(codes + p * panel);
        for (; inputs; inputs--, x += mr) {
            ADDED(x, at_place(words[p], 0, &less[p][0]))
            for (int p = 0; p < np; p++)
                for (int f = 0; f < FOLDS; f++) words[p].part[f] >>= 4;
        }
        return;
    }
    octets bytes[4];
    for (; inputs >= each; inputs -= each, codes += LANES, x += each * mr) {
        for (int p = 0; p < np; p++) bytes[p] = octets_at(codes + p * panel);
        for (int which = 0; which < each; which++) ADDED(x + which * mr, unpacked(kind, bytes[p], which, &zero[p]))
    }
    if (inputs) {
        for (int p = 0; p < np; p++) bytes[p] = octets_at(codes + p * panel);
        ADDED(x, unpacked(kind, bytes[p], 0, &zero[p]))
    }
}

INLINE void tile_of(const struct job *j, const struct tile *t, int kind, int mr, int np)
{
    const int64_t panel = j->steps * bytes_of(kind) * LANES;
    const uint8_t *codes = j->codes + t->panel * panel;
    vec total[MOST][4 * FOLDS];
    for (int m = 0; m < mr; m++)
        for (int i = 0; i < np * FOLDS; i++) total[m][i] = (vec){0};
    for (int64_t g = 0; g < j->groups; g++) {
        vec sum[MOST][4 * FOLDS];
        int64_t begin = g * j->group, inputs = begin + j->group < j->k ? j->group : j->k - begin;
        int64_t at = (t->panel * j->groups + g) * LANES;
        for (int m = 0; m < mr; m++)
            for (int i = 0; i < np * FOLDS; i++) sum[m][i] = (vec){0};
        group_of(t->rows + begin * mr, codes + begin / inputs_of(kind) * bytes_of(kind) * LANES, panel,
                 j->zeros ? j->zeros + at : NULL, j->groups * LANES, inputs, kind, mr, np, sum);
        for (int p = 0; p < np; p++) {
            numbers scale = scales_at(j->scales, at + p * j->groups * LANES, j->wide);
            for (int m = 0; m < mr; m++)
                for (int f = 0; f < FOLDS; f++) total[m][p * FOLDS + f] += sum[m][p * FOLDS + f] * scale.part[f];
        }
    }
    for (int m = 0; m < mr; m++)
        for (int i = 0; i < np * FOLDS; i++) finish(j, t, m, (int64_t)i * EACH, total[m][i]);
}

#define CASE(M, P) case (M) * 8 + (P): tile_of(j, t, kind, M, P); break;
INLINE void sized(const struct job *j, const struct tile *t, int kind, int mr, int np)
{
    switch (mr * 8 + np) {
        CASE(1, 1) CASE(1, 2) CASE(1, 4) CASE(2, 1) CASE(2, 2) CASE(3, 1) CASE(3, 2)
        CASE(4, 1) CASE(5, 1) CASE(6, 1)
#if BYTES == 64
        CASE(4, 2) CASE(5, 2) CASE(6, 2)
#endif
    }
}

/* Panels of a tile of `mr` rows: few rows need several, as each sum waits for its last product, and INT4 fewer, as its
 * words take registers as well. */
INLINE int panels_of(int kind, int mr)
{
#if BYTES == 64
    return mr == 1 ? 4 : 2;
#else
    int most = mr == 1 ? 4 : mr <= 3 ? 2 : 1;
    return kind == INT4 && most > 1 ? most / 2 : most;
#endif
}

#define OF_KIND(name, KIND_OF) \
    static void name(const struct job *j, const struct tile *t, int mr, int np) { sized(j, t, KIND_OF, mr, np); }
OF_KIND(of_int4, INT4)
OF_KIND(of_int8, INT8)
OF_KIND(of_zeroed8, ZEROED8)
OF_KIND(of_e4m3, E4M3)
OF_KIND(of_fp4, FP4)
static void (*const OF[])(const struct job *, const struct tile *, int, int) = {of_int4, of_int8, of_zeroed8, of_e4m3, of_fp4};

/* Rows `[m][k]` as tiles of `each`: of each the numbers of one input lie together. */
static void side_by_side(const struct job *j, const stored *rows, int64_t m, int64_t each, real *to)
{
    for (int64_t row = 0; row < m; row += each) {
        int64_t mr = m - row < each ? m - row : each;
        for (int64_t i = 0; i < mr; i++) {
            const stored *from = rows + (row + i) * j->k;
            for (int64_t k = 0; k < j->k; k++) to[row * j->k + k * mr + i] = get(from + k);
        }
    }
}

/* Rows `m` of one expert times its panels `first` to `last - 1`. */
static void some(const struct job *j, int64_t expert, const stored *rows, stored *out, int64_t m, int64_t first, int64_t last)
{
    for (int64_t top = 0; top < m; top += TALL) {
        int64_t tall = m - top < TALL ? m - top : TALL, tiles = (tall + MOST - 1) / MOST;
        int64_t each = (tall + tiles - 1) / tiles;
        real *left = aerie_scratch(0, sizeof(real) * tall * j->k + 64);
        side_by_side(j, rows + top * j->k, tall, each, left);
        int most = panels_of(j->kind, (int)each), np;
        for (int64_t p = first; p < last; p += np) {
            for (np = most; np > last - p;) np /= 2;
            for (int64_t row = 0; row < tall; row += each) {
                int64_t at = p * LANES;
                struct tile t = {
                    .rows = left + row * j->k, .panel = expert * j->panels + p,
                    .bias = j->bias ? j->bias + expert * j->n + at : NULL, .out = out + (top + row) * j->n + at,
                    .columns = j->n - at};
                OF[j->kind](j, &t, (int)(tall - row < each ? tall - row : each), np);
            }
        }
    }
}

static void part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    int64_t start = 0, first = j->panels * part / parts, last = j->panels * (part + 1) / parts;
    for (int64_t e = 0; e < j->experts; e++) {
        int64_t end = j->ends ? j->ends[e] : j->m;
        if (end > start) some(j, e, j->rows + start * j->k, j->out + start * j->n, end - start, first, last);
        start = end;
    }
}

/* rows [m, k]; codes, scales and zeros (or NULL) in panels, of one expert after the other; bias [experts, n] or NULL,
 * ends [experts] or NULL. `group` inputs share a scale; it is a multiple
 * of 8, or there is one group. `wide`: scales are float32. */
void NAMED(aerie_codes)(const stored *rows, const uint8_t *codes, const void *scales, const uint8_t *zeros,
                        const stored *bias, stored *out, int64_t m, int64_t k, int64_t n, int64_t group, int64_t kind,
                        int64_t wide, const int32_t *ends, int64_t experts, int64_t threads)
{
    int64_t each = inputs_of((int)kind);
    struct job j = {rows, codes, scales, zeros, bias, out, m, k, n, group, (int)kind, (int)wide, ends, experts,
                    (k + each - 1) / each, (k + group - 1) / group, (n + LANES - 1) / LANES};
    int64_t enough = 1 + m * k * n / 65536;
    aerie_spread(part, &j, threads < enough ? threads : enough);
}
