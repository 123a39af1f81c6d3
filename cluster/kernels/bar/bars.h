/* What a token bitmask adds to logits. `bar` writes the sums; `choice` ranks by them without writing them. */
#pragma once
#include "../c/vector.h"

enum { WORD = 32 }; /* tokens in a word of a bitmask */
static const whole PLACES[16] __attribute__((aligned(64))) = {
    1, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7,
    1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};

/* Sets the numbers that are added to logits: more[0] for a token whose bit is 0, more[1] for a token whose bit is 1.
 * They are `far` and 0, or both NaN if the mask has no bit set at all.
 */
INLINE void bars_of(const int32_t *mask, int64_t words, real far, real *more)
{
    int32_t any = 0;
    for (int64_t w = 0; w < words; w++) any |= mask[w];
    more[0] = any ? far : (real)NAN, more[1] = any ? 0 : (real)NAN;
}

/* Masks EACH logits by the lowest bits of `bits`. The two frequent cases are handled first: all of these tokens are
 * allowed, or none.
 */
INLINE vec barred(vec logits, uint32_t bits, const real *more)
{
    const uint32_t every = (1u << EACH) - 1;
    if ((bits & every) == every) return logits + more[1];
    if ((bits & every) == 0) return logits + more[0];
    ints has = ((whole)bits - (ints){0}) & *(const ints *)PLACES;
    return logits + (vec)(((has == 0) & (ints)all(more[0])) | ((has != 0) & (ints)all(more[1])));
}
