/* Unpacking of codes, one input a turn. */
#pragma once

INLINE int inputs_of(int kind) { return kind == INT4 ? 8 : kind == FP4 ? 2 : 1; }

INLINE numbers real_of(integers x)
{
    numbers to;
    for (int f = 0; f < FOLDS; f++) to.part[f] = __builtin_convertvector(x.part[f], vec);
    return to;
}

/* Twice the numbers of FP4 e2m1, as signed bytes. */
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

/* INT4 is decoded without shifts. In the float F = 2^(FRACTION - 4 i), the mantissa bits at place i of a word (four
 * bits) count units. So F with the four bits of the code OR-ed in is F + code. Subtracting F + zero, which is exact,
 * leaves code - zero.
 */
#define PLACES 4
#if KIND == 64
#define FRACTION 52
#else
#define FRACTION 23
#endif

typedef struct {
    octets bytes;
    integers words; /* for INT4 */
} step;

/* What is subtracted from the codes of a group. */
typedef struct {
    integers zero;
    numbers places[PLACES]; /* for INT4: float + zero at each place */
} origin;

INLINE vec place_of(int i) { return all((real)((int64_t)1 << (FRACTION - 4 * i))); }

INLINE origin origin_of(int kind, octets zeros)
{
    origin to = {.zero = widened(zeros)};
    if (kind == INT4) {
        numbers zero = real_of(to.zero);
        for (int i = 0; i < PLACES; i++)
            for (int f = 0; f < FOLDS; f++) to.places[i].part[f] = place_of(i) + zero.part[f];
    }
    return to;
}

INLINE step step_at(int kind, const uint8_t *from, int64_t left)
{
    typedef uint32_t some __attribute__((vector_size(4 * EACH), aligned(4), may_alias));
    step to;
    (void)left;
    if (kind != INT4)
        to.bytes = octets_at(from);
    else
        for (int f = 0; f < FOLDS; f++) to.words.part[f] = __builtin_convertvector(((const some *)from)[f], ints);
    return to;
}

/* Returns the factors code - zero of one turn. Turns must be in order, as the words of INT4 are shifted halfway. */
INLINE factors factors_of(int kind, step *s, int turn, const origin *less)
{
    factors to;
    numbers x;
    if (kind == INT4) {
        int i = turn % PLACES;
        for (int f = 0; f < FOLDS; f++) {
            if (turn == PLACES) s->words.part[f] >>= 16;
            to.part[f] = (vec)((s->words.part[f] & (whole)(15 << 4 * i)) | (ints)place_of(i)) - less->places[i].part[f];
        }
        return to;
    }
    if (kind == E4M3)
        x = from_e4m3(s->bytes);
    else if (kind == FP4)
        x = real_of(widened(twice_fp4(turn ? s->bytes >> 4 : s->bytes & 15)));
    else {
        integers whole_numbers = widened(s->bytes);
        if (kind == ZEROED8)
            for (int f = 0; f < FOLDS; f++) whole_numbers.part[f] -= less->zero.part[f];
        x = real_of(whole_numbers);
    }
    for (int f = 0; f < FOLDS; f++) to.part[f] = x.part[f];
    return to;
}

/* Returns the entry of one turn of a row of `k` inputs; 0 beyond them. */
INLINE entry entry_at(const stored *row, int kind, int64_t turn, int64_t k) { return (void)kind, turn < k ? get(row + turn) : 0; }
