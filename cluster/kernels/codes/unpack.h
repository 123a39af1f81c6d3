/* Unpacks codes of quantised weights to factors in registers. A panel is stored as LANES bytes for each input; FP4:
 * LANES bytes for two inputs, the first in the low halves; INT4: LANES words for eight inputs, the first in the lowest
 * bits.
 *
 * A step is the part of a panel that is read at once. It has one or more turns, each of TURN inputs (see turn.h). If a
 * turn has two inputs, the turns of an INT4 step have inputs 0 and 4, 1 and 5, and so on. If the last step has more
 * inputs than the matrix, the entries of the rows are zero for the surplus inputs.
 */
#pragma once
#include "../c/e4m3.h"
#include "../c/turn.h"

enum { INT4, INT8, ZEROED8, E4M3, FP4 }; /* ZEROED8: INT8 with a zero for each group of a column */

typedef struct { factor part[FOLDS]; } factors;

INLINE octets same(uint8_t x) { return x - (octets){0}; }

#if TURN == 2
#include "pairs.h"
#else
#include "singles.h"
#endif

INLINE int turns_of(int kind) { return inputs_of(kind) / TURN; }

/* Loads LANES scales, stored as float32 (`wide`) or bfloat16. */
INLINE numbers scales_at(const void *from, int64_t at, int wide)
{
    numbers to;
#if KIND == 64
    for (int f = 0; f < FOLDS; f++)
        for (int i = 0; i < EACH; i++, at++) {
            uint32_t bits = wide ? ((const uint32_t *)from)[at] : (uint32_t)((const uint16_t *)from)[at] << 16;
            float x;
            memcpy(&x, &bits, 4);
            to.part[f][i] = x;
        }
#else
    typedef uint16_t shorts __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
    typedef uint32_t longs __attribute__((vector_size(BYTES)));
    for (int f = 0; f < FOLDS; f++, at += EACH) {
        if (wide)
            to.part[f] = *(const loose *)((const float *)from + at);
        else
            to.part[f] = (vec)(__builtin_convertvector(*(const shorts *)((const uint16_t *)from + at), longs) << 16);
    }
#endif
    return to;
}
