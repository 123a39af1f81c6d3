/* Products of quantised weights by AMX tiles (see c/amx.h): codes are unpacked once for all rows. The sums of a group,
 * and the totals of all groups so far, are kept in memory. Each group begins a new tile, and its last tile is filled up
 * with zeros.
 */
#pragma once
#include "../c/amx.h"

#define TALL 256 /* rows for which a code is unpacked once */
#define CHUNK 8  /* unpacked tiles of a panel that stay in the L1 cache */
#define TURNS_OF_TILE (STEP / TURN)

/* Panels and rows that are computed together; `out` is where the sum of the first row and column goes. */
struct strip {
    const entry *rows; /* each tile of rows is [groups][tiles of a group][each][TURNS_OF_TILE] */
    /* All rows; rows of a tile; tiles of rows; tiles of rows computed at a time; tiles of inputs of a group of codes.
     */
    int64_t tall, each, tiles, high, steps;
    int64_t panel;                          /* the first panel, counted over all experts */
    const stored *bias;
    stored *out;
    int64_t columns; /* columns from the first panel to the end of the matrix */
};

/* Unpacks `tiles` whole tiles of a group that has `inputs` inputs left. */
INLINE void numbers_of(int kind, const uint8_t *codes, const origin *less, int64_t inputs, int64_t tiles, factor *to)
{
    const factor *end = to + tiles * TURNS_OF_TILE;
    for (; inputs > 0 && to < end; inputs -= inputs_of(kind), codes += bytes_of(kind, inputs_of(kind))) {
        step s = step_at(kind, codes, inputs);
        __builtin_prefetch(codes + bytes_of(kind, CHUNK * STEP)); /* the next chunk of this panel */
        for (int turn = 0; turn < turns_of(kind); turn++) *to++ = factors_of(kind, &s, turn, less).part[0];
    }
    while (to < end) *to++ = _mm512_setzero_si512();
}

/* Adds the scaled sums of a group to the totals. */
INLINE void scaled(const sums *sum, sums *total, int64_t each, int np, const numbers *scale)
{
    for (int p = 0; p < np; p++)
        for (int64_t i = 0; i < each * SIDE; i += SIDE)
            *(loose *)(total[p] + i) += *(const loose *)(sum[p] + i) * scale[p].part[0];
}

INLINE void strip_of(const struct job *j, const struct strip *t, int kind, int np)
{
    int64_t heights = (t->tiles + t->high - 1) / t->high, bytes = sizeof(sums) * SUMS_HELD * heights;
    int64_t of_rows = j->groups * t->steps * t->each * STEP;
    sums *all = aerie_scratch(1, 2 * bytes), *totals = all + SUMS_HELD * heights;
    factor *ready = aerie_scratch(2, sizeof(factor) * SUMS_HELD * CHUNK * TURNS_OF_TILE);
    memset(totals, 0, bytes);
    for (int64_t g = 0; g < j->groups; g++) {
        int64_t begin = g * j->group, inputs = begin + j->group < j->k ? j->group : j->k - begin;
        for (int64_t done = 0, tiles; done < t->steps; done += tiles) {
            tiles = t->steps - done < CHUNK ? t->steps - done : CHUNK;
            numbers scale[SUMS_HELD];
            for (int p = 0; p < np; p++) {
                int64_t panel = t->panel + p, at = (panel * j->groups + g) * LANES;
                const uint8_t *codes = j->codes + panel * j->bytes + bytes_of(kind, begin + done * STEP);
                origin less = origin_of(kind, j->zeros ? octets_at(j->zeros + at) : same(8));
                numbers_of(kind, codes, &less, inputs - done * STEP, tiles, ready + p * CHUNK * TURNS_OF_TILE);
                scale[p] = scales_at(j->scales, at, j->wide);
            }
            for (int64_t tile = 0; tile < t->tiles; tile += t->high) {
                int there = (int)(t->tiles - tile < t->high ? t->tiles - tile : t->high);
                int64_t at = tile / t->high * SUMS_HELD;
                struct group group_now = {
                    .rows = (const stored *)t->rows + tile * of_rows + (g * t->steps + done) * t->each * STEP,
                    .panels = (const stored *)ready, .each = t->each, .steps = tiles, .tile = of_rows,
                    .panel = CHUNK * BLOCK, .at = all + at, .onward = done > 0};
                group(&group_now, there, np);
                for (int h = 0; done + tiles == t->steps && h < there; h++)
                    scaled(all + at + 2 * h, totals + at + 2 * h, t->each, np, scale);
            }
        }
    }
    for (int64_t row = 0; row < t->tall; row++)
        for (int p = 0; p < np; p++) {
            int64_t tile = row / t->each, at = tile / t->high * SUMS_HELD + tile % t->high * 2 + p;
            finish(t->out + row * j->n + p * LANES, t->bias ? t->bias + p * LANES : NULL, t->columns - p * LANES,
                   *(const loose *)(totals[at] + row % t->each * SIDE));
        }
}

/* INT4's order of inputs: the four turns of eight inputs are inputs 0 and 4, 1 and 5, and so on (see unpack.h). */
static const uint16_t ORDER[STEP] = {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,  13, 10, 14, 11, 15,
                                     16, 20, 17, 21, 18, 22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31};

/* Packs rows [m][k] in tiles of `each` rows and groups in whole tiles of inputs, both filled with zeros. */
static void entries_of(const struct job *j, const stored *rows, const struct strip *t, entry *to)
{
    int64_t step = t->each * TURNS_OF_TILE;
    for (int64_t row = 0; row < t->tiles * t->each; row++) {
        const stored *from = rows + (row < t->tall ? row : 0) * j->k;
        entry *at = to + row / t->each * j->groups * t->steps * step + row % t->each * TURNS_OF_TILE;
        for (int64_t group = 0; group < j->k; group += j->group) {
            int64_t end = group + j->group < j->k ? group + j->group : j->k;
            for (int64_t tile = 0; tile < t->steps; tile++, at += step) {
                int64_t k = group + tile * STEP;
                __m512i inputs = inputs_at(from + k, row < t->tall ? end - k : 0);
                if (j->kind == INT4) inputs = _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), inputs);
                _mm512_storeu_si512(at, inputs);
            }
        }
    }
}

#define STRIPS_OF(KIND_OF) case KIND_OF: strip(j, &t, KIND_OF, np); break;
#define PANELS_OF(P) case P: strip_of(j, t, kind, P); break;
INLINE void strip(const struct job *j, const struct strip *t, int kind, int np)
{
    switch (np) { PANELS_OF(1) PANELS_OF(2) PANELS_OF(3) PANELS_OF(4) }
}

/* Computes `m` rows of one expert times its panels `first` to `last - 1`. */
static void some(const struct job *j, int64_t expert, const stored *rows, stored *out, int64_t m, int64_t first, int64_t last)
{
    for (int64_t top = 0; top < m; top += TALL) {
        int64_t tall = m - top < TALL ? m - top : TALL, tiles = (tall + SIDE - 1) / SIDE, high = tiles == 1 ? 1 : 2;
        struct strip t = {
            .tall = tall, .tiles = tiles, .each = (tall + tiles - 1) / tiles, .high = high, .steps = (j->group + STEP - 1) / STEP};
        entry *left = aerie_scratch(0, sizeof(entry) * tiles * t.each * j->groups * t.steps * TURNS_OF_TILE);
        entries_of(j, rows + top * j->k, &t, left);
        t.rows = left;
        configure(t.each, (int)high);
        for (int64_t p = first; p < last; p += SUMS_HELD / high) {
            int np = (int)(last - p < SUMS_HELD / high ? last - p : SUMS_HELD / high);
            t.panel = expert * j->panels + p, t.out = out + top * j->n + p * LANES, t.columns = j->n - p * LANES;
            t.bias = j->bias ? j->bias + expert * j->n + p * LANES : NULL;
            switch (j->kind) { STRIPS_OF(INT4) STRIPS_OF(INT8) STRIPS_OF(ZEROED8) STRIPS_OF(E4M3) STRIPS_OF(FP4) }
        }
        release();
    }
}
