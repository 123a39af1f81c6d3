/* Products with all sums of a tile in registers. The numbers of a panel are loaded to a register once for all rows of
 * the tile.
 */
#pragma once
#include "../c/turn.h"

#define INPUTS(k) (k) /* inputs of a panel */
#if BYTES == 64
#define MOST 12 /* rows of a tile: their sums fill the registers */
#else
#define MOST 6
#endif
#define DEEP (512 * TURN) /* inputs at once if there are several tiles of rows: a panel then stays in the L1 cache */
#define TALL (MOST * 8 * TURN)
#define BAND 48 /* rows from which a thread computes all columns of its rows */
#define AHEAD 32 /* a panel that only one tile of rows reads is prefetched this many turns before its use */

struct tile {
    const entry *rows; /* [turns of k][mr] */
    const stored *panels;
    const factor *ready; /* the panels' factors, unpacked once if several tiles share them */
    int64_t k, panel; /* inputs; stride between panels, in numbers */
    const real *from; /* previous sums; NULL: start at 0 */
    real *to;         /* where unfinished sums go; NULL: they are complete, and go to `out` */
    int64_t width;    /* row stride of `from` and `to` */
    const stored *bias;
    stored *out;
    int64_t n, columns;
    int alone;          /* no other tile of rows reads these panels */
    const stored *next; /* a panel to prefetch, which all tiles need next; NULL: none */
};

/* Prefetches what one turn reads of a panel; the address may be past the last panel. */
INLINE void ask(const stored *panel)
{
    for (size_t at = 0; at < TURN * LANES * sizeof *panel; at += 64) __builtin_prefetch((const char *)panel + at);
}

INLINE void tile_of(const struct tile *t, int mr, int np, int ready)
{
    vec sum[MOST][8 * FOLDS];
    int64_t turns = TURNS(t->k);
    for (int m = 0; m < mr; m++)
        for (int j = 0; j < np * FOLDS; j++)
            sum[m][j] = t->from ? (vec) * (const loose *)(t->from + m * t->width + j * EACH) : (vec){0};
    const stored *panel[8];
    const factor *held[8];
    for (int p = 0; p < np; p++) panel[p] = t->panels + p * t->panel, held[p] = t->ready + p * turns * FOLDS;
    const entry *rows = t->rows;
    for (int64_t k = 0; k < turns; k++, rows += mr) {
        factor weight[8 * FOLDS];
        if (t->alone && mr > 1) {
            int64_t at = k + AHEAD, past = at < turns ? 0 : (np - 1) * t->panel; /* at the end: the next tile's panels */
            for (int p = 0; p < np; p++) ask(panel[p] + past + at * TURN * LANES);
        } else if (t->next) {
            ask(t->next + k * TURN * LANES);
        }
        for (int p = 0; p < np; p++)
            for (int f = 0; f < FOLDS; f++)
                weight[p * FOLDS + f] = ready ? held[p][k * FOLDS + f]
                                              : factor_of(panel[p] + k * TURN * LANES + f * EACH, t->k - k * TURN);
        for (int m = 0; m < mr; m++)
            for (int j = 0; j < np * FOLDS; j++) sum[m][j] = joined(sum[m][j], rows[m], weight[j]);
    }
    for (int m = 0; m < mr; m++)
        for (int j = 0; j < np * FOLDS; j++) {
            if (t->to)
                *(loose *)(t->to + m * t->width + j * EACH) = sum[m][j];
            else
                finish(t->out + m * t->n + j * EACH, t->bias ? t->bias + j * EACH : NULL, t->columns - j * EACH, sum[m][j]);
        }
}

#define CASE(M, P) case (M) * 16 + (P): tile_of(t, M, P, ready); break;
INLINE void sized(const struct tile *t, int mr, int np, int ready)
{
    switch (mr * 16 + np) {
        CASE(1, 1) CASE(1, 2) CASE(1, 4) CASE(2, 1) CASE(2, 2) CASE(3, 1) CASE(3, 2)
        CASE(4, 1) CASE(5, 1) CASE(6, 1)
#if BYTES == 64
        CASE(1, 8) CASE(2, 4) CASE(3, 4) CASE(4, 2) CASE(4, 4) CASE(5, 2) CASE(5, 4) CASE(6, 2) CASE(6, 4)
        CASE(7, 1) CASE(7, 2) CASE(8, 1) CASE(8, 2) CASE(9, 1) CASE(9, 2) CASE(10, 1) CASE(10, 2)
        CASE(11, 1) CASE(11, 2) CASE(12, 1) CASE(12, 2)
#endif
    }
}

static void tile(const struct tile *t, int mr, int np) { sized(t, mr, np, 0); }
#if KIND == 16
static void tile_ready(const struct tile *t, int mr, int np) { sized(t, mr, np, 1); }

/* Unpacks the factors of `deep` inputs of `np` panels, panel after panel. */
static const factor *readied(const stored *panels, int64_t panel, int np, int64_t deep)
{
    int64_t turns = TURNS(deep);
    factor *all = aerie_scratch(2, sizeof(factor) * np * turns * FOLDS);
    for (int p = 0; p < np; p++)
        for (int64_t at = 0; at < turns * FOLDS; at++)
            all[p * turns * FOLDS + at] = factor_of(panels + p * panel + at * TURN * EACH, deep - at / FOLDS * TURN);
    return all;
}
#endif

/* Returns how many panels a tile of `mr` rows has. A tile of few rows needs several panels to hide the latency of
 * products.
 */
INLINE int panels_of(int mr)
{
#if BYTES == 64
    return mr == 1 ? 8 : mr <= 6 ? 4 : 2;
#else
    return mr == 1 ? 4 : mr <= 3 ? 2 : 1;
#endif
}

/* Packs the `mr` rows of a tile, which are `stride` numbers apart, so that the entries of one turn are adjacent:
 * [turns][mr]. If there are at least 4 rows, it transposes blocks of 4 rows and 4 turns; the last block of rows may
 * overlap the one before.
 */
INLINE void packed_tile(const stored *rows, int64_t stride, int64_t mr, int64_t deep, entry *to)
{
    int64_t turns = TURNS(deep), whole = mr < 4 ? 0 : deep / (4 * TURN) * 4;
    for (int64_t i = 0; whole && i < mr; i += 4) {
        if (i > mr - 4) i = mr - 4;
        for (int64_t k = 0; k < whole; k += 4) {
            four x[4];
            for (int r = 0; r < 4; r++) x[r] = four_of(rows + (i + r) * stride + k * TURN);
            transpose(x);
            for (int t = 0; t < 4; t++) *(loose_four *)(to + (k + t) * mr + i) = x[t];
        }
    }
    for (int64_t i = 0; i < mr; i++)
        for (int64_t k = whole; k < turns; k++) to[k * mr + i] = entry_of(rows + i * stride + k * TURN, deep - k * TURN);
}

/* Packs `deep` inputs of rows [m][k], from column `begin` on, in tiles of `each` rows. */
static void packed(const struct job *j, const stored *rows, int64_t m, int64_t each, int64_t begin, int64_t deep, entry *to)
{
    for (int64_t row = 0; row < m; row += each)
        packed_tile(rows + row * j->k + begin, j->k, m - row < each ? m - row : each, deep, to + row * TURNS(deep));
}

/* Computes `m` rows times panels `first` to `last - 1` of one matrix. */
static void some(const struct job *j, const stored *rows, const stored *panels, const stored *bias, stored *out, int64_t m,
                 int64_t first, int64_t last)
{
    int64_t width = (last - first) * LANES;
    for (int64_t top = 0; top < m; top += TALL) {
        int64_t tall = m - top < TALL ? m - top : TALL, tiles = (tall + MOST - 1) / MOST;
        int64_t each = (tall + tiles - 1) / tiles, deepest = tiles == 1 ? j->k : DEEP;
        entry *left = aerie_scratch(0, sizeof(entry) * tall * TURNS(deepest < j->k ? deepest : j->k) + 64);
        real *sums = deepest < j->k ? aerie_scratch(1, sizeof(real) * tall * width) : NULL;
        for (int64_t begin = 0; begin < j->k; begin += deepest) {
            int64_t deep = j->k - begin < deepest ? j->k - begin : deepest;
            packed(j, rows + top * j->k, tall, each, begin, deep, left);
            int most = panels_of((int)each), np;
            for (int64_t p = first; p < last; p += np) {
                for (np = most; np > last - p;) np /= 2;
                const stored *here = panels + (p * j->k + begin) * LANES;
                const factor *ready = NULL;
#if KIND == 16
                if (tiles > 1) ready = readied(here, j->k * LANES, np, deep);
#endif
                for (int64_t row = 0; row < tall; row += each) {
                    int64_t at = p * LANES, tile_number = row / each, next = p + np + tile_number;
                    real *sum = sums ? sums + row * width + (p - first) * LANES : NULL;
                    struct tile t = {
                        .rows = left + row * TURNS(deep), .panels = here, .ready = ready, .k = deep,
                        .panel = j->k * LANES, .from = begin ? sum : NULL, .to = begin + deep < j->k ? sum : NULL,
                        .width = width, .bias = bias ? bias + at : NULL, .out = out + (top + row) * j->n + at, .n = j->n,
                        .columns = j->n - at,
                        .alone = tiles == 1,
                        .next = tiles > 1 && tile_number < np && next < last ? panels + (next * j->k + begin) * LANES : NULL};
                    int mr = (int)(tall - row < each ? tall - row : each);
#if KIND == 16
                    if (ready) {
                        tile_ready(&t, mr, np);
                        continue;
                    }
#endif
                    tile(&t, mr, np);
                }
            }
        }
    }
}
