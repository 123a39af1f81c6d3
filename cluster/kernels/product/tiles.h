/* Products of bfloat16 by AMX tiles (see c/amx.h). Panels are stored as the instruction reads them:
 * panels[column / 16][k / 2][column % 16][k % 2], with k filled with zeros to whole tiles.
 */
#pragma once
#include "../c/amx.h"

#define INPUTS(k) (((k) + STEP - 1) / STEP * STEP)
#define DEEP 2048 /* inputs at once if there are several tiles of rows: two panels of them stay in the L2 cache */
#define TALL 256  /* rows for which a panel is read from memory once */
#define BAND 128  /* rows from which a thread computes all columns of its rows */

/* Packs `deep` inputs of rows [m][k], from column `begin` on, in tiles [steps][each][STEP]. Rows and inputs that are
 * missing in the last tile are zeros.
 */
static void packed(const struct job *j, const stored *rows, int64_t m, int64_t each, int64_t begin, int64_t deep, stored *to)
{
    int64_t steps = INPUTS(deep) / STEP, filled = (m + each - 1) / each * each;
    for (int64_t row = 0; row < filled; row++) {
        const stored *from = rows + (row < m ? row : 0) * j->k + begin;
        stored *at = to + (row / each * steps * each + row % each) * STEP;
        for (int64_t k = 0; k < steps * STEP; k += STEP, at += each * STEP)
            _mm512_storeu_si512(at, inputs_at(from + k, row < m ? deep - k : 0));
    }
}

/* Computes `m` rows times panels `first` to `last - 1` of one matrix. */
static void some(const struct job *j, const stored *rows, const stored *panels, const stored *bias, stored *out, int64_t m,
                 int64_t first, int64_t last)
{
    for (int64_t top = 0; top < m; top += TALL) {
        int64_t tall = m - top < TALL ? m - top : TALL, tiles = (tall + SIDE - 1) / SIDE, each = (tall + tiles - 1) / tiles;
        int64_t high = tiles == 1 ? 1 : 2, wide = SUMS_HELD / high, heights = (tiles + high - 1) / high;
        int64_t deepest = tiles == 1 || j->k <= DEEP ? j->k : DEEP, kept = deepest < j->k ? (last - first + wide - 1) / wide : 0;
        stored *left = aerie_scratch(0, sizeof(stored) * tiles * each * INPUTS(deepest));
        sums *all = aerie_scratch(1, sizeof(sums) * SUMS_HELD * (kept ? kept * heights : 1));
        configure(each, (int)high);
        for (int64_t begin = 0; begin < j->k; begin += deepest) {
            int64_t deep = j->k - begin < deepest ? j->k - begin : deepest, steps = INPUTS(deep) / STEP;
            packed(j, rows + top * j->k, tall, each, begin, deep, left);
            for (int64_t p = first; p < last; p += wide) {
                int np = (int)(last - p < wide ? last - p : wide), more = last - p >= 2 * wide;
                for (int64_t tile = 0; tile < tiles; tile += high) {
                    int there = (int)(tiles - tile < high ? tiles - tile : high);
                    struct group g = {
                        .rows = left + tile * steps * each * STEP, .panels = panels + (p * INPUTS(j->k) + begin) * LANES,
                        .each = each, .steps = steps, .tile = steps * each * STEP, .panel = INPUTS(j->k) * LANES,
                        .onward = begin > 0, .alone = tiles == 1,
                        .at = all + (kept ? ((p - first) / wide * heights + tile / high) * SUMS_HELD : 0)};
                    if (tile == 0 && more) g.next = g.panels + wide * g.panel;
                    group(&g, there, np);
                    if (begin + deep < j->k) continue;
                    for (int64_t row = tile * each; row < tall && row < (tile + there) * each; row++)
                        for (int q = 0; q < np; q++) {
                            const real *sum = g.at[(row / each - tile) * 2 + q] + row % each * SIDE;
                            int64_t column = (p + q) * LANES;
                            finish(out + (top + row) * j->n + column, bias ? bias + column : NULL, j->n - column,
                                   *(const loose *)sum);
                        }
                }
            }
        }
        release();
    }
}
