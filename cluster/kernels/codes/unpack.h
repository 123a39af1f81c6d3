/* Codes of quantised weights -> numbers in registers. What lies together of a panel: LANES bytes of one input; of FP4, of
 * two inputs, the first in the low halves of the bytes; of INT4 LANES words of eight inputs, the first in the lowest bits.
 */
#pragma once
#include "../c/e4m3.h"

enum { INT4, INT8, ZEROED8, E4M3, FP4 }; /* ZEROED8: INT8 less the zero of each column's group */

INLINE octets same(uint8_t x) { return x - (octets){0}; }

INLINE numbers real_of(integers x)
{
    numbers to;
    for (int f = 0; f < FOLDS; f++) to.part[f] = __builtin_convertvector(x.part[f], vec);
    return to;
}

/* Twice the numbers of FP4 e2m1, as bytes with signs. */
INLINE octets twice_fp4(octets code)
{
    static const int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#if defined(__AVX__) && KIND != 64
    __m128i held = _mm_loadu_si128((const __m128i *)table);
    return (octets)_mm_shuffle_epi8(held, (__m128i)code);
#else
    octets to;
    for (int i = 0; i < LANES; i++) to[i] = (uint8_t)table[code[i]];
    return to;
#endif
}

/* The numbers of one input: the first (`which` 0) or second of a step, less their `zero`. */
INLINE numbers unpacked(int kind, octets step, int which, const integers *zero)
{
    if (kind == E4M3) return from_e4m3(step);
    if (kind == FP4) return real_of(widened(twice_fp4(which ? step >> 4 : step & 15)));
    integers x = widened(step);
    if (kind == ZEROED8)
        for (int f = 0; f < FOLDS; f++) x.part[f] -= zero->part[f];
    return real_of(x);
}

/* INT4: the four bits at place i of a word, put where a float of fit size has them as its last whole numbers, are that
 * float plus the code. What is taken away is the float and the zero, exactly.
 */
#define PLACES 4
#if KIND == 64
#define FRACTION 52
#else
#define FRACTION 23
#endif

INLINE vec place_of(int i) { return all((real)((int64_t)1 << (FRACTION - 4 * i))); }

INLINE integers words_at(const uint8_t *from)
{
    integers to;
    typedef uint32_t some __attribute__((vector_size(4 * EACH), aligned(4), may_alias));
    for (int f = 0; f < FOLDS; f++) to.part[f] = __builtin_convertvector(((const some *)from)[f], ints);
    return to;
}

INLINE numbers at_place(integers words, int i, const numbers *less)
{
    numbers to;
    for (int f = 0; f < FOLDS; f++)
        to.part[f] = (vec)((words.part[f] & (whole)(15 << 4 * i)) | (ints)place_of(i)) - less->part[f];
    return to;
}

/* LANES scales, as float32 (`wide`) or bfloat16. */
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
