/* FP8 e4m3: decodes LANES bytes to registers, and encodes one number. */
#pragma once
#include "vector.h"
#ifdef __AVX__
#include <immintrin.h>
#endif

typedef uint8_t octets __attribute__((vector_size(LANES)));
typedef uint8_t anywhere __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t piece __attribute__((vector_size(EACH)));
typedef struct { vec part[FOLDS]; } numbers;
typedef struct { ints part[FOLDS]; } integers;

INLINE octets octets_at(const uint8_t *from) { return *(const anywhere *)from; }

/* Sign-extends bytes to integers. */
INLINE integers widened(octets b)
{
    integers to;
#if defined(__AVX512F__) && KIND != 64
    to.part[0] = (ints)_mm512_cvtepi8_epi32((__m128i)b);
#elif defined(__AVX2__) && KIND != 64
    to.part[0] = (ints)_mm256_cvtepi8_epi32((__m128i)b);
    to.part[1] = (ints)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)b, (__m128i)b));
#else
    piece pieces[FOLDS];
    memcpy(pieces, &b, sizeof b);
    for (int f = 0; f < FOLDS; f++) to.part[f] = __builtin_convertvector(pieces[f], ints);
#endif
    return to;
}

/* Decodes FP8 e4m3 to value / 256. A code that is shifted by 7 bits has the layout of a half-precision number. But the
 * exponent bias of a half is 15 instead of 7, so the half is value / 256. The instruction that converts halves also
 * handles denormals. CPUs without that instruction shift the code into the bits of a `real` and multiply by `scale`.
 */
INLINE numbers from_e4m3(octets b)
{
    numbers to;
#if defined(__AVX512F__) && KIND != 64
    __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)b), 7), _mm256_set1_epi16((short)0xbfff));
    to.part[0] = (vec)_mm512_cvtph_ps(half);
#elif defined(__F16C__) && defined(__AVX2__) && KIND != 64
    __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)b), 7), _mm256_set1_epi16((short)0xbfff));
    to.part[0] = (vec)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
    to.part[1] = (vec)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
#else
#if KIND == 64
    const whole up = 49, sign = INT64_MIN;
    const real scale = 0x1p1008;
#else
    const whole up = 20, sign = INT32_MIN;
    const real scale = 0x1p112f;
#endif
    integers x = widened(b);
    for (int f = 0; f < FOLDS; f++) {
        ints bits = ((x.part[f] & 0x7f) << up) | (x.part[f] & sign);
        to.part[f] = (vec)bits * scale;
    }
#endif
    return to;
}

/* Returns the nearest code, ties to even, of a number from -448 to 448. Normal numbers: rounds the mantissa from 23 to
 * 3 bits. Below 2^-6, the smallest normal number, codes are 2^-9 apart, as floats from 2^14 on are: adding 2^14 rounds
 * to a multiple of 2^-9 and leaves the code in the low bits.
 */
INLINE uint8_t e4m3_of(float x)
{
    uint32_t bits, tiny;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    memcpy(&x, &size, 4);
    x += 0x1p14f;
    memcpy(&tiny, &x, 4);
    return (uint8_t)(sign | (size < 0x3c800000 ? tiny & 0xff : normal));
}
