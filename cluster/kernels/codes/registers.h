/* Products with all sums in registers; for few rows, unpacked codes stay in registers too. */
#pragma once

#define MOST 6 /* rows of a tile */
#define HIGH (MOST * 4) /* rows whose entries are packed at once */

struct tile {
    const entry *rows; /* [turns][mr] */
    int64_t panel;     /* the first panel, counted over all experts */
    const stored *bias;
    stored *out;
    int64_t columns;   /* columns from the first panel to the end of the matrix */
};

INLINE void out_of(const struct job *j, const struct tile *t, int row, int64_t column, vec x)
{
    finish(t->out + row * j->n + column, t->bias ? t->bias + column : NULL, t->columns - column, x);
}

/* Adds one group of `inputs` inputs to `sum`; the codes of two panels are `panel` bytes apart. */
INLINE void group_of(const entry *x, const uint8_t *codes, int64_t panel, const uint8_t *zeros, int64_t zeros_panel,
                     int64_t inputs, int kind, int mr, int np, vec sum[MOST][4 * FOLDS])
{
    origin less[4];
    for (int p = 0; p < np; p++) less[p] = origin_of(kind, zeros ? octets_at(zeros + p * zeros_panel) : same(8));
    for (; inputs > 0; inputs -= inputs_of(kind), codes += bytes_of(kind, inputs_of(kind)), x += turns_of(kind) * mr) {
        step steps[4];
        for (int p = 0; p < np; p++) steps[p] = step_at(kind, codes + p * panel, inputs);
#pragma GCC unroll 8
        for (int turn = 0; turn < turns_of(kind); turn++)
#pragma GCC unroll 4
            for (int p = 0; p < np; p++) {
                factors weight = factors_of(kind, &steps[p], turn, &less[p]);
                for (int m = 0; m < mr; m++)
                    for (int f = 0; f < FOLDS; f++)
                        sum[m][p * FOLDS + f] = joined(sum[m][p * FOLDS + f], x[turn * mr + m], weight.part[f]);
            }
    }
}

INLINE void tile_of(const struct job *j, const struct tile *t, int kind, int mr, int np)
{
    const uint8_t *codes = j->codes + t->panel * j->bytes;
    vec total[MOST][4 * FOLDS];
    for (int m = 0; m < mr; m++)
        for (int i = 0; i < np * FOLDS; i++) total[m][i] = (vec){0};
    for (int64_t g = 0; g < j->groups; g++) {
        vec sum[MOST][4 * FOLDS];
        int64_t begin = g * j->group, inputs = begin + j->group < j->k ? j->group : j->k - begin;
        int64_t at = (t->panel * j->groups + g) * LANES;
        for (int m = 0; m < mr; m++)
            for (int i = 0; i < np * FOLDS; i++) sum[m][i] = (vec){0};
        group_of(t->rows + begin / TURN * mr, codes + bytes_of(kind, begin), j->bytes,
                 j->zeros ? j->zeros + at : NULL, j->groups * LANES, inputs, kind, mr, np, sum);
        for (int p = 0; p < np; p++) {
            numbers scale = scales_at(j->scales, at + p * j->groups * LANES, j->wide);
            for (int m = 0; m < mr; m++)
                for (int f = 0; f < FOLDS; f++) total[m][p * FOLDS + f] += sum[m][p * FOLDS + f] * scale.part[f];
        }
    }
    for (int m = 0; m < mr; m++)
        for (int i = 0; i < np * FOLDS; i++) out_of(j, t, m, (int64_t)i * EACH, total[m][i]);
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

/* Returns how many panels a tile of `mr` rows has. A tile of few rows needs several panels to hide the latency of
 * products. With short registers, a tile of INT4 has fewer panels, because the words of codes take registers too.
 */
INLINE int panels_of(int kind, int mr)
{
    if (BYTES == 64) return mr == 1 ? 4 : 2;
    int most = mr == 1 ? 4 : mr <= 3 ? 2 : 1;
    return kind == INT4 && most > 1 ? most / 2 : most;
}

#define OF_KIND(name, KIND_OF) \
    static void name(const struct job *j, const struct tile *t, int mr, int np) { sized(j, t, KIND_OF, mr, np); }
OF_KIND(of_int4, INT4)
OF_KIND(of_int8, INT8)
OF_KIND(of_zeroed8, ZEROED8)
OF_KIND(of_e4m3, E4M3)
OF_KIND(of_fp4, FP4)
static void (*const OF[])(const struct job *, const struct tile *, int, int) = {of_int4, of_int8, of_zeroed8, of_e4m3, of_fp4};

/* Packs rows [m][k] in tiles of `each` rows, in which the entries of one turn are adjacent: [turns][each]. */
static void entries_of(const struct job *j, const stored *rows, int64_t m, int64_t each, entry *to)
{
    for (int64_t row = 0; row < m; row += each) {
        int64_t mr = m - row < each ? m - row : each;
        for (int64_t i = 0; i < mr; i++) {
            const stored *from = rows + (row + i) * j->k;
            for (int64_t turn = 0; turn < j->turns; turn++)
                to[row * j->turns + turn * mr + i] = entry_at(from, j->kind, turn, j->k);
        }
    }
}

/* Returns the tile at panel `p` of an expert, with the rows' entries and their output. */
INLINE struct tile tile_at(const struct job *j, int64_t expert, int64_t p, const entry *rows, stored *out)
{
    return (struct tile){
        .rows = rows, .panel = expert * j->panels + p, .out = out + p * LANES, .columns = j->n - p * LANES,
        .bias = j->bias ? j->bias + expert * j->n + p * LANES : NULL};
}

#if TURN == 2
#include "many.h"
#endif

/* Computes `m` rows of one expert times its panels `first` to `last - 1`. */
static void some(const struct job *j, int64_t expert, const stored *rows, stored *out, int64_t m, int64_t first, int64_t last)
{
#if TURN == 2
    if (m > MOST) {
        many(j, expert, rows, out, m, first, last);
        return;
    }
#endif
    for (int64_t top = 0; top < m; top += HIGH) {
        int64_t tall = m - top < HIGH ? m - top : HIGH, tiles = (tall + MOST - 1) / MOST;
        int64_t each = (tall + tiles - 1) / tiles;
        entry *left = aerie_scratch(0, sizeof(entry) * tall * j->turns + 64);
        entries_of(j, rows + top * j->k, tall, each, left);
        int most = panels_of(j->kind, (int)each), np;
        for (int64_t p = first; p < last; p += np) {
            for (np = most; np > last - p;) np /= 2;
            for (int64_t row = 0; row < tall; row += each) {
                struct tile t = tile_at(j, expert, p, left + row * j->turns, out + (top + row) * j->n);
                OF[j->kind](j, &t, (int)(tall - row < each ? tall - row : each), np);
            }
        }
    }
}
