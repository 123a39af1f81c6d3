/* Unpacking of codes in bfloat16 pairs, two inputs a turn. It is exact: every code - zero is a bfloat16 number. */
#pragma once

INLINE int inputs_of(int kind) { return kind == INT4 ? 8 : 2; }

typedef struct {
    /* INT8 and ZEROED8 have one input in each. Other kinds use `low` only; in E4M3, its two inputs are interleaved. */
    __m512i low, high;
} step;

/* The zeros of a group's codes. */
typedef struct {
    __m512i zero; /* INT4: in both halves, for both inputs */
} origin;

INLINE origin origin_of(int kind, octets zeros)
{
    __m512i zero = _mm512_cvtepi8_epi32((__m128i)zeros);
    return (origin){kind == INT4 ? _mm512_or_si512(zero, _mm512_slli_epi32(zero, 16)) : zero};
}

/* Reads a step; `left` inputs are left, in the last step perhaps only one. */
INLINE step step_at(int kind, const uint8_t *from, int64_t left)
{
    const __m128i *at = (const __m128i *)from;
    step to = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    if (kind == INT4)
        to.low = _mm512_loadu_si512(from);
    else if (kind == FP4)
        to.low = _mm512_cvtepu8_epi32(_mm_loadu_si128(at));
    else if (kind == E4M3)
        to.low = side_by_side(_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(left > 1 ? ~(__mmask32)0 : 0xffff, from)));
    else {
        to.low = _mm512_cvtepi8_epi32(_mm_loadu_si128(at));
        if (left > 1) to.high = _mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1));
    }
    return to;
}

/* Integers from -16 to 15 as bfloat16, indexed by their last five bits. */
static const uint16_t WHOLE[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};

/* Twice the numbers of FP4 e2m1 as bfloat16; the fifth bit of the index is ignored. */
static const uint16_t TWICE_FP4[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, 0x0000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, 0x0000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140};

/* Denormal numbers of FP8 e4m3, divided by 256, as bfloat16, indexed by their last three bits. */
static const uint16_t TINY[32] = {0x0000, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};

/* Packs two vectors of floats, which are bfloat16 numbers, as pairs. */
INLINE factors paired(__m512 low, __m512 high)
{
    __m512i first = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
    return (factors){{_mm512_or_si512(first, _mm512_castps_si512(high))}};
}

/* Returns the factors code - zero of one turn. */
INLINE factors factors_of(int kind, const step *s, int turn, const origin *less)
{
    if (kind == INT4) {
        __m512i codes = _mm512_and_si512(_mm512_srli_epi32(s->low, 4 * turn), _mm512_set1_epi32(0xf000f));
        codes = _mm512_sub_epi16(codes, less->zero);
        return (factors){{_mm512_permutexvar_epi16(codes, _mm512_loadu_si512(WHOLE))}};
    }
    if (kind == FP4) {
        __m512i codes = _mm512_or_si512(s->low, _mm512_slli_epi32(s->low, 12));
        return (factors){{_mm512_permutexvar_epi16(codes, _mm512_loadu_si512(TWICE_FP4))}};
    }
    if (kind == E4M3) { /* value / 256: bfloat16's exponent is FP8's + 120 - 8, and e + 112 = e | 112 as e < 16 */
        __m512i x = _mm512_slli_epi16(s->low, 4), normal = _mm512_set1_epi16(0x7f0), power = _mm512_set1_epi16(0x3800);
        x = _mm512_ternarylogic_epi32(x, normal, power, 0xea); /* (x & normal) | power */
        __mmask32 tiny = _mm512_testn_epi16_mask(s->low, _mm512_set1_epi16(0x78));
        x = _mm512_mask_permutexvar_epi16(x, tiny, s->low, _mm512_loadu_si512(TINY));
        return (factors){{_mm512_ternarylogic_epi32(x, s->low, _mm512_set1_epi16((short)0x8000), 0xf8)}}; /* x | (code & sign) */
    }
    __m512i low = s->low, high = s->high;
    if (kind == ZEROED8) low = _mm512_sub_epi32(low, less->zero), high = _mm512_sub_epi32(high, less->zero);
    return paired(_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(high));
}

/* Returns the entry of one turn of a row of `k` inputs; 0 beyond them. */
INLINE entry entry_at(const stored *row, int kind, int64_t turn, int64_t k)
{
    int64_t first = kind == INT4 ? turn / 4 * 8 + turn % 4 : 2 * turn, second = first + (kind == INT4 ? 4 : 1);
    return (first < k ? row[first] : 0) | (second < k ? (entry)row[second] << 16 : 0);
}
