/* Products for more rows than one tile has, in bfloat16 pairs: the factors of some turns are unpacked once for all
 * rows. The sums of a group, and the totals of all groups so far, are kept in memory.
 */
#pragma once

#define BLOCK 12 /* rows of a tile */
#define ABREAST 2 /* panels of a tile */
#define TALL (BLOCK * 8) /* rows for which a code is unpacked once */
#define AHEAD 256 /* turns (a multiple of a step's) whose factors stay in the L1 cache */

/* Unpacks the next turns of a group to factors [turns][np]: at most AHEAD turns. The group has `inputs` more inputs. */
INLINE void ready_of(int kind, const uint8_t *codes, int64_t panel, const origin *less, int64_t inputs, int np, factor *to)
{
    for (int64_t done = 0; done < AHEAD && inputs > 0; done += turns_of(kind), inputs -= inputs_of(kind)) {
        for (int p = 0; p < np; p++) {
            step s = step_at(kind, codes + p * panel, inputs);
            for (int turn = 0; turn < turns_of(kind); turn++)
                to[(done + turn) * np + p] = factors_of(kind, &s, turn, &less[p]).part[0];
        }
        codes += bytes_of(kind, inputs_of(kind));
    }
}

/* Some turns of a group. `begins` and `ends` say whether they are the first and the last turns of the group; `scale`
 * has the group's scales for each panel.
 */
struct stretch {
    const factor *ready;
    int64_t turns;
    int begins, ends;
    numbers scale[ABREAST];
};

/* Adds some turns to a tile's sums of a group [mr][np * LANES]; if the group ends, adds the scaled sums to the totals.
 */
INLINE void onward(const struct stretch *s, const entry *rows, real *sums, real *totals, int mr, int np)
{
    vec sum[BLOCK][ABREAST];
    const factor *ready = s->ready;
    for (int m = 0; m < mr; m++)
        for (int p = 0; p < np; p++) sum[m][p] = s->begins ? (vec){0} : (vec) * (const loose *)(sums + (m * np + p) * LANES);
    for (int64_t turn = 0; turn < s->turns; turn++, rows += mr, ready += np)
        for (int m = 0; m < mr; m++)
            for (int p = 0; p < np; p++) sum[m][p] = joined(sum[m][p], rows[m], ready[p]);
    for (int m = 0; m < mr; m++)
        for (int p = 0; p < np; p++) {
            if (s->ends)
                *(loose *)(totals + (m * np + p) * LANES) += sum[m][p] * s->scale[p].part[0];
            else
                *(loose *)(sums + (m * np + p) * LANES) = sum[m][p];
        }
}

#define ROWS_OF(M) case M: np == 1 ? onward(s, rows, sums, totals, M, 1) : onward(s, rows, sums, totals, M, 2); break;
static void onward_by(const struct stretch *s, const entry *rows, real *sums, real *totals, int mr, int np)
{
    switch (mr) {
        ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) ROWS_OF(6)
        ROWS_OF(7) ROWS_OF(8) ROWS_OF(9) ROWS_OF(10) ROWS_OF(11) ROWS_OF(12)
    }
}

/* Computes several tiles of `each` rows times `np` panels. */
INLINE void strip_of(const struct job *j, const struct tile *t, int kind, int64_t rows, int64_t each, int np)
{
    const uint8_t *codes = j->codes + t->panel * j->bytes;
    const int64_t wide = np * LANES;
    real *sums = aerie_scratch(1, sizeof(real) * 2 * rows * wide), *totals = sums + rows * wide;
    factor *ready = aerie_scratch(2, sizeof(factor) * AHEAD * np);
    memset(totals, 0, sizeof(real) * rows * wide);
    for (int64_t g = 0; g < j->groups; g++) {
        int64_t inputs, end = (g + 1) * j->group < j->k ? (g + 1) * j->group : j->k;
        int64_t at = (t->panel * j->groups + g) * LANES;
        origin less[ABREAST];
        struct stretch s = {.ready = ready};
        for (int p = 0; p < np; p++, at += j->groups * LANES) {
            less[p] = origin_of(kind, j->zeros ? octets_at(j->zeros + at) : same(8));
            s.scale[p] = scales_at(j->scales, at, j->wide);
        }
        for (int64_t begin = g * j->group; begin < end; begin += inputs) {
            inputs = end - begin < AHEAD * TURN ? end - begin : AHEAD * TURN;
            s.turns = (inputs + inputs_of(kind) - 1) / inputs_of(kind) * turns_of(kind);
            s.begins = begin == g * j->group, s.ends = begin + inputs == end;
            ready_of(kind, codes + bytes_of(kind, begin), j->bytes, less, inputs, np, ready);
            for (int64_t row = 0; row < rows; row += each) {
                int64_t mr = rows - row < each ? rows - row : each;
                const entry *from = t->rows + row * j->turns + begin / TURN * mr;
                onward_by(&s, from, sums + row * wide, totals + row * wide, (int)mr, np);
            }
        }
    }
    for (int64_t i = 0; i < rows * np; i++)
        out_of(j, t, (int)(i / np), i % np * LANES, *(const loose *)(totals + i * LANES));
}

#define STRIPS_OF(KIND_OF) case KIND_OF: strip_of(j, &t, KIND_OF, tall, each, np); break;
/* Computes `m` rows of one expert times its panels `first` to `last - 1`. */
static void many(const struct job *j, int64_t expert, const stored *rows, stored *out, int64_t m, int64_t first, int64_t last)
{
    for (int64_t top = 0; top < m; top += TALL) {
        int64_t tall = m - top < TALL ? m - top : TALL, tiles = (tall + BLOCK - 1) / BLOCK;
        int64_t each = (tall + tiles - 1) / tiles;
        entry *left = aerie_scratch(0, sizeof(entry) * tall * j->turns + 64);
        entries_of(j, rows + top * j->k, tall, each, left);
        for (int64_t p = first; p < last; p += ABREAST) {
            int np = last - p < ABREAST ? 1 : ABREAST;
            struct tile t = tile_at(j, expert, p, left, out + top * j->n);
            switch (j->kind) { STRIPS_OF(INT4) STRIPS_OF(INT8) STRIPS_OF(ZEROED8) STRIPS_OF(E4M3) STRIPS_OF(FP4) }
        }
    }
}
