/* One turn of a product's sums: TURN inputs of a row, its entry, times as many inputs of EACH columns, a factor.
 *
 * One input a turn, a product and a sum rounded once where there are fused products. Where bfloat16 has an instruction of
 * its own (AVX512-BF16, vdpbf16ps), two: both products are exact, and added one after the other; what is too small for a
 * normal number counts as zero. `left` inputs are still to come: of the last one where their number is odd, the other
 * half of entry and factor is zero.
 */
#pragma once
#include "vector.h"

#if KIND == 16 && defined(__AVX512BF16__)
#include <immintrin.h>
#define TURN 2
typedef uint32_t entry; /* the first input in its lower half */
typedef __m512i factor;

/* The numbers of one input, and those of another behind them, column by column. */
INLINE factor side_by_side(__m512i both)
{
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), both);
}

INLINE factor factor_of(const stored *at, int64_t left)
{
    return side_by_side(_mm512_maskz_loadu_epi16(left > 1 ? ~(__mmask32)0 : 0xffff, at));
}

INLINE entry entry_of(const stored *at, int64_t left) { return at[0] | (left > 1 ? (entry)at[1] << 16 : 0); }

/* By hand: the compiler takes its own function for one that may write to memory, and stores all sums in every turn. */
INLINE vec joined(vec sum, entry x, factor weight)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(_mm512_set1_epi32((int)x)), "v"(weight));
    return sum;
}
#else
#define TURN 1
typedef real entry;
typedef vec factor;

INLINE factor factor_of(const stored *at, int64_t left) { return (void)left, load(at); }
INLINE entry entry_of(const stored *at, int64_t left) { return (void)left, get(at); }
INLINE vec joined(vec sum, entry x, factor weight) { return sum + all(x) * weight; }
#endif

#define TURNS(inputs) (((inputs) + TURN - 1) / TURN)
