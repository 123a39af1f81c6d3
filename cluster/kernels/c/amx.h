/* AMX tiles of 16 rows and 16 columns: one instruction adds the products of 32 inputs. It sums the products of even
 * inputs and of odd inputs in two chains, and adds both to the previous sum; denormal numbers count as zero. A row's
 * bits do not depend on the number of rows in its tile, so even a single row uses a tile.
 *
 * The instructions are inline assembly, because older compilers do not support AMX, but their assemblers do.
 */
#pragma once
#include "vector.h"
#include <immintrin.h>

#define SIDE 16 /* rows of a tile, and columns */
#define STEP 32 /* inputs of a tile */
#define BLOCK (SIDE * STEP)
#define SUMS_HELD 4 /* sums in registers, to hide the latency of products: 2 tiles of rows x 2 panels, or 1 x 4 */
#define AHEAD 4     /* a panel that only one tile of rows reads is prefetched this many tiles before its use */

typedef real sums[SIDE * SIDE];

/* Tile registers 0 to 3 hold sums, 4 holds a tile of rows, 6 and 7 hold tiles of panels. Register 5 holds a second tile
 * of rows or a third tile of panels.
 */
#define CLEAR(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define LOAD(tile, at) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"((int64_t)64) : "memory")
#define STORE(tile, at) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"((int64_t)64) : "memory")
#define JOIN(sum, rows, panel) __asm__ volatile("tdpbf16ps %%tmm" #panel ", %%tmm" #rows ", %%tmm" #sum ::)

/* Configures the tile registers for `high` (1 or 2) tiles of `each` rows at a time. If `high` is 1, register 5 holds a
 * tile of a panel.
 */
INLINE void configure(int64_t each, int high)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shape.bytes[tile] = 64;
        shape.rows[tile] = (uint8_t)(tile < 5 || (tile == 5 && high == 2) ? each : SIDE);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
}

/* Releases the tiles: with live tiles, a context switch has more state to save. */
INLINE void release(void) { __asm__ volatile("tilerelease" ::); }

/* One tile of rows times up to four panels, or two tiles times up to two panels, for some steps of STEP inputs. */
struct group {
    const stored *rows;   /* each tile is [steps][each][STEP] */
    const stored *panels; /* each panel is [steps][STEP / 2][SIDE][2] */
    int64_t each, steps, tile, panel; /* tile, panel: strides between tiles of rows and between panels, in numbers */
    sums *at;                   /* [high][2], or [np] with one tile of rows */
    int onward;                 /* continue the sums in `at`; else start at 0 */
    int alone;                  /* no other tile of rows reads these panels */
    const stored *next;         /* the next panels, to be prefetched; NULL: none, or another group prefetches them */
};

/* Loads STEP inputs of a row. If the row has only `left` more inputs, the others are zeros. */
INLINE __m512i inputs_at(const stored *from, int64_t left)
{
    __mmask32 there = left >= STEP ? ~(__mmask32)0 : left > 0 ? ((__mmask32)1 << left) - 1 : 0;
    return _mm512_maskz_loadu_epi16(there, from);
}

INLINE void ask(const stored *block, int far)
{
    for (int i = 0; i < BLOCK; i += 32) far ? __builtin_prefetch(block + i, 0, 2) : __builtin_prefetch(block + i);
}

/* Computes `high` tiles of rows times `np` panels. */
INLINE void group_of(const struct group *g, int high, int np)
{
    const int third = high == 2 || np > 2, fourth = np > 3 || (high == 2 && np == 2);
    if (g->onward) {
        LOAD(0, g->at[0]);
        if (np > 1) LOAD(1, g->at[1]);
        if (third) LOAD(2, g->at[2]);
        if (fourth) LOAD(3, g->at[3]);
    } else {
        CLEAR(0);
        CLEAR(1);
        CLEAR(2);
        CLEAR(3);
    }
    const stored *rows = g->rows, *panel = g->panels;
    for (int64_t k = 0; k < g->steps; k++, rows += g->each * STEP, panel += BLOCK) {
        int64_t past = k + AHEAD < g->steps ? 0 : (np - 1) * g->panel; /* at the end: the next group's panels */
        for (int p = 0; p < np; p++) {
            if (g->alone)
                ask(panel + p * g->panel + past + AHEAD * BLOCK, 0);
            else if (g->next)
                ask(g->next + p * g->panel + k * BLOCK, 1);
        }
        LOAD(4, rows);
        LOAD(6, panel);
        JOIN(0, 4, 6);
        if (np > 1) {
            LOAD(7, panel + g->panel);
            JOIN(1, 4, 7);
        }
        if (high == 2) {
            LOAD(5, rows + g->tile);
            JOIN(2, 5, 6);
            if (np > 1) JOIN(3, 5, 7);
        } else if (np > 2) {
            LOAD(5, panel + 2 * g->panel);
            JOIN(2, 4, 5);
            if (np > 3) {
                LOAD(6, panel + 3 * g->panel);
                JOIN(3, 4, 6);
            }
        }
    }
    STORE(0, g->at[0]);
    if (np > 1) STORE(1, g->at[1]);
    if (third) STORE(2, g->at[2]);
    if (fourth) STORE(3, g->at[3]);
}

#define CASE(H, P) case (H) * 8 + (P): group_of(g, H, P); break;
static void group(const struct group *g, int high, int np)
{
    switch (high * 8 + np) { CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(2, 1) CASE(2, 2) }
}
