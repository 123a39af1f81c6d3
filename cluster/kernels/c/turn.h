/* One turn of a product: sum += entry * factor. An entry is TURN inputs of a row; a factor is the weights of these
 * inputs in EACH columns.
 *
 * Usually a turn has one input, and uses a fused multiply-add if the target supports it. With AVX512-BF16 (vdpbf16ps) a
 * turn has two inputs: both products are exact, and are added one after the other; denormal numbers count as zero.
 * `left` is the number of inputs that the row still has. If it is 1, the second half of entry and factor is zero.
 */
#pragma once
#include "vector.h"

#if KIND == 16 && defined(__AVX512BF16__)
#include <immintrin.h>
#define TURN 2
typedef uint32_t entry; /* the first input is in the lower half */
typedef __m512i factor;

/* Interleaves the weights of two inputs: `both` has all weights of the first input and then those of the second; the
 * result has the two weights of each column side by side.
 */
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

/* Inline assembly, because the compiler assumes that the intrinsic may write memory, and so would store all sums in
 * each turn.
 */
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

/* Entries of four turns, or of four rows. */
typedef entry four __attribute__((vector_size(4 * sizeof(entry))));
typedef entry loose_four __attribute__((vector_size(4 * sizeof(entry)), aligned(sizeof(stored)), may_alias));

/* Loads the entries of four full turns. */
INLINE four four_of(const stored *at)
{
#if KIND == 16 && TURN == 1
    return (four){get(at), get(at + 1), get(at + 2), get(at + 3)};
#else
    return *(const loose_four *)at;
#endif
}

/* Transposes entries [row][turn] of four rows and four turns to [turn][row]. */
INLINE void transpose(four x[4])
{
    four a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
    four c = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
    x[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5), x[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    x[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5), x[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

#define TURNS(inputs) (((inputs) + TURN - 1) / TURN)
