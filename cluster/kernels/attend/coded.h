/* FP8 cells: the codes of all numbers, then one scale byte for each group of numbers, then zeros; see arch/cell.py. A
 * scale is a power of two, so code * scale is exact in every dtype.
 */
#pragma once
#include "../c/e4m3.h"

#define LEAST 10 /* least byte b of a scale 2^(b - 127): the smallest number, scale * 2^-9, is still a normal float */

#if KIND == 64
typedef uint64_t pattern;
#define OF_NUMBER 1023
#define MANTISSA 52
#else
typedef uint32_t pattern;
#define OF_NUMBER 127
#define MANTISSA 23
#endif
#define MOST (((pattern)(OF_NUMBER + 127) << MANTISSA) + ((pattern)3 << (MANTISSA - 2))) /* 448 * 2^119 */

INLINE real power(uint8_t byte)
{
    uint32_t bits = (uint32_t)byte << 23;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Returns the bits of the greatest magnitude. As integers, the bits of NaN are above those of infinity, the highest. */
static pattern greatest(const stored *from, int64_t count)
{
    pattern most = 0;
    for (int64_t i = 0; i < count; i++) {
        real x = get(from + i);
        pattern bits;
        memcpy(&bits, &x, sizeof bits);
        bits &= ~(pattern)0 >> 1;
        most = bits > most ? bits : most;
    }
    return most;
}

/* Returns the byte of the smallest scale 2^e with most <= 448 * 2^e = 1.75 * 2^(e + 8): adding a quarter of the
 * mantissa's range, less one, carries into the exponent if the mantissa is above 1.75.
 */
INLINE uint8_t scale_of(pattern most)
{
    int64_t exponent = (int64_t)((most + ((pattern)1 << (MANTISSA - 2)) - 1) >> MANTISSA) - OF_NUMBER + 127 - 8;
    return (uint8_t)(exponent < LEAST ? LEAST : exponent);
}

static void encode(uint8_t *to, const stored *from, int64_t count, uint8_t scale)
{
    real inverse = power((uint8_t)(254 - scale));
    for (int64_t i = 0; i < count; i++) to[i] = e4m3_of((float)(get(from + i) * inverse));
}

/* Decodes `count` numbers, then writes zeros up to `whole`. An invalid scale byte (above 246), as in memory that was
 * never written, can give infinity or NaN. The factor 256 is needed because `from_e4m3` returns value / 256.
 */
INLINE void decode(real *to, const uint8_t *from, int64_t count, int64_t whole, uint8_t scale)
{
    vec factor = all(power(scale) * 256);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        numbers x = from_e4m3(octets_at(from + i));
        for (int f = 0; f < FOLDS; f++) *(loose *)(to + i + f * EACH) = x.part[f] * factor;
    }
    if (i < count) {
        octets rest = {0};
        real last[LANES];
        memcpy(&rest, from + i, count - i);
        numbers x = from_e4m3(rest);
        for (int f = 0; f < FOLDS; f++) *(loose *)(last + f * EACH) = x.part[f] * factor;
        memcpy(to + i, last, sizeof(real) * (count - i));
    }
    for (i = count; i < whole; i++) to[i] = 0;
}
