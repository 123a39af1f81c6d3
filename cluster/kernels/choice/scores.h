/* Scores of tokens: the logit, masked out by the grammar's bitmask, times the inverse temperature, lowered by FAR if a
 * filter excludes the token, plus keyed Gumbel noise.
 *
 * Compiled without fused multiply-add (`build.py`), so that the noise of a token has the same bits on every CPU, alone
 * or in a vector, for draft and target.
 */
#pragma once
#include "../bar/bars.h"
#include "../c/threads.h"

#define FAR ((real)64)
#define MOST 64 /* the most tokens that one call takes of a row */

/* `inverse` (temperature) and `scale` (of noise) are per request. All strides are in numbers. */
struct aerie_choice {
    const stored *logits;   /* [requests * each, size] */
    const int64_t *keys;    /* [requests, positions]; NULL: no noise, and scores are masked logits */
    const int64_t *which;   /* [requests, each]: index of each row's key; NULL: row i of a request: i * `position` */
    const uint32_t *hashes; /* [size], the hash of each token */
    const real *inverse, *scale;
    const real *least;    /* [requests * each], the filters' threshold of tempered logits; NULL: no filters */
    const int32_t *masks; /* [requests * each, words], bitmasks of allowed tokens; NULL: all tokens of all rows */
    real *scores;      /* [requests * each, count] */
    int64_t *columns;  /* [requests * each, count] */
    real *total;       /* [requests * each], for FOUND */
    int64_t requests, each, size, stride, keys_stride, position, inverse_stride, scale_stride, words, count, kind, threads;
    double barred; /* added to the logit of a token that is masked out */
};

typedef uint32_t hashed __attribute__((vector_size(4 * EACH)));
typedef uint32_t loose_hashed __attribute__((vector_size(4 * EACH), aligned(4), may_alias));
typedef int32_t numbers __attribute__((vector_size(4 * EACH)));

/* One row, with its sampling parameters. */
struct row {
    const stored *logits;
    const uint32_t *hashes;
    int64_t size;
    uint32_t low, high; /* the key of its noise */
    real inverse, scale, least;
    const int32_t *mask;
    real more[2]; /* what the bitmask adds; see `bars_of` */
    int noisy;
};

INLINE struct row row_of(const struct aerie_choice *c, int64_t number)
{
    int64_t request = number / c->each, at = number % c->each;
    struct row row = {c->logits + number * c->stride, c->hashes, c->size, 0, 0, 1, 0, -(real)INFINITY, NULL, {0}, 0};
    if (c->masks) {
        row.mask = c->masks + number * c->words;
        bars_of(row.mask, c->words, (real)c->barred, row.more);
    }
    if (!c->keys) return row;
    int64_t position = c->which ? c->which[number] : at * c->position;
    uint64_t key = (uint64_t)c->keys[request * c->keys_stride + position];
    row.low = (uint32_t)key, row.high = (uint32_t)(key >> 32);
    row.inverse = c->inverse[request * c->inverse_stride], row.scale = c->scale[request * c->scale_stride];
    if (c->least) row.least = c->least[number];
    row.noisy = row.scale != 0;
    return row;
}

INLINE vec chosen_of(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }

#if KIND == 64
#define FRACTION 52
#define BIAS ((whole)1023)
#define SHIFT ((real)6755399441055744.0)
#define SERIES 12
#define LEAST_BELOW_ONE ((real)(1 - 0x1p-53))
#else
#define FRACTION 23
#define BIAS ((whole)127)
#define SHIFT ((real)12582912.0f)
#define SERIES 5
#define LEAST_BELOW_ONE ((real)(1 - 0x1p-24))
#endif

/* Returns k with x = m 2^k and m between sqrt(1/2) and sqrt(2). */
INLINE ints power_of(vec x)
{
    return ((ints)x - (ints)all((real)0.70710678118654752440)) >> FRACTION;
}

/* Converts small integers to `vec`: added to the bits of 1.5 * 2^FRACTION, which is then subtracted. */
INLINE vec floats(ints x) { return (vec)((ints)all(SHIFT) + x) - SHIFT; }

/* k log 2 + log(1 + f) for f = m - 1, by log(1 + f) = 2 artanh(s), s = f / (2 + f). */
INLINE vec logarithm_of(ints k, vec f)
{
    const real high = KIND == 64 ? (real)0.693147180369123816490 : (real)0.693359375f;
    const real low = KIND == 64 ? (real)1.90821492927058770002e-10 : (real)-2.12194440e-4f;
    vec s = f / (f + (real)2), square = s * s, sum = all((real)2 / (real)(2 * SERIES + 1)), turns = floats(k);
    for (int n = SERIES - 1; n > 0; n--) sum = sum * square + (real)2 / (real)(2 * n + 1);
    sum *= square;
    return turns * high + (turns * low - s * (f - sum) + f);
}

/* log(x) of positive, normal numbers. */
INLINE vec logarithm(vec x)
{
    ints k = power_of(x);
    return logarithm_of(k, (vec)((ints)x - (k << FRACTION)) - (real)1);
}

INLINE real logarithm_of_one(real x) { return logarithm(all(x))[0]; }

/* Uniform numbers in (0, 1): (b + 0.5) / 2^31 for 31 hash bits b, below 1 even after rounding. */
INLINE vec uniform(const struct row *row, hashed hash)
{
    hashed x = hash ^ row->low;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu ^ row->high;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    x = (x ^ (x >> 16)) & 0x7FFFFFFFu;
    vec u = (__builtin_convertvector((numbers)x, vec) + (real)0.5) * (real)0x1p-31;
    return chosen_of(u < LEAST_BELOW_ONE, u, all(LEAST_BELOW_ONE));
}

/* -log(1 - u). k comes from the rounded 1 - u, but f = (1 - u) 2^-k - 1 is computed from u itself, to keep small u
 * exact.
 */
INLINE vec exponential_draw(vec u)
{
    ints k = power_of((real)1 - u);
    vec scale = (vec)((BIAS - k) << FRACTION);
    return -logarithm_of(k, (scale - (real)1) - scale * u);
}

INLINE vec gumbel(vec u) { return -logarithm(exponential_draw(u)); }

/* Returns an upper bound of `gumbel(u)` that is close to it: -log(u), where log2 is interpolated linearly between
 * powers of two. The bits of u (exponent and mantissa), read as one integer, are this interpolation.
 */
INLINE vec gumbel_at_most(vec u)
{
#if KIND == 64
    vec line = __builtin_convertvector(__builtin_convertvector((ints)u >> 32, numbers), vec) * (real)0x1p-20;
#else
    vec line = __builtin_convertvector((ints)u, vec) * (real)0x1p-23f;
#endif
    return ((real)BIAS - line) * (real)0.69314718055994530942 + (real)1e-4;
}

/* Returns EACH tempered, masked and filtered logits, of the tokens from `at` on. */
INLINE vec tempered(const struct row *row, vec logits, int64_t at)
{
    if (row->mask) logits = barred(logits, (uint32_t)row->mask[at / WORD] >> at % WORD, row->more);
    vec x = logits * row->inverse;
    return chosen_of(x < row->least, x - FAR, x);
}

/* Returns whether the row has a mask and `exponential(score - most)` is exactly 0 for all tokens that it masks out. */
INLINE int barred_weigh_nothing(const struct row *row, real most)
{
    return row->mask && row->more[0] * row->inverse - most < -(real)10000;
}

/* Whether the row's bitmask allows none of the LANES tokens from `at` on. */
INLINE int none_allowed(const struct row *row, int64_t at)
{
    return !((uint32_t)row->mask[at / WORD] >> at % WORD & ((1u << LANES) - 1));
}

enum { EXACT, AT_MOST, WEIGHT };

/* From tempered logits x: scores (EXACT), upper bounds of scores (AT_MOST), or exp(score - most) (WEIGHT). With a noise
 * scale of 1, a weight needs only one logarithm: exp(x + gumbel) = exp(x) / -log(1 - u).
 */
INLINE vec made_of(const struct row *row, int noisy, int what, real most, vec x, hashed hash)
{
    if (!noisy) return what == WEIGHT ? exponential(x - most) : x;
    vec u = uniform(row, hash);
    if (what == AT_MOST) return x + gumbel_at_most(u) * row->scale;
    if (what == WEIGHT && row->scale == 1) return exponential(x - most) / exponential_draw(u);
    vec score = x + gumbel(u) * row->scale;
    return what == WEIGHT ? exponential(score - most) : score;
}

/* `made_of` for the EACH tokens from `at` on; tokens beyond the row have logit -infinity. */
INLINE vec made_at(const struct row *row, int noisy, int what, real most, int64_t at)
{
    int64_t left = row->size - at;
    hashed hash = {0};
    if (left >= EACH) {
        if (noisy) hash = *(const loose_hashed *)(row->hashes + at);
        return made_of(row, noisy, what, most, tempered(row, load(row->logits + at), at), hash);
    }
    stored some[EACH];
    uint32_t hashes[EACH];
    for (int i = 0; i < EACH; i++) {
        put(some + i, i < left ? get(row->logits + at + i) : -(real)INFINITY);
        hashes[i] = noisy && i < left ? row->hashes[at + i] : 0;
    }
    memcpy(&hash, hashes, sizeof hash);
    return made_of(row, noisy, what, most, tempered(row, load(some), at), hash);
}

INLINE vec scores_at(const struct row *row, int noisy, int64_t at) { return made_at(row, noisy, EXACT, 0, at); }

INLINE vec bounds_at(const struct row *row, int noisy, int64_t at) { return made_at(row, noisy, AT_MOST, 0, at); }

INLINE vec weights_at(const struct row *row, int noisy, real most, int64_t at)
{
    return made_at(row, noisy, WEIGHT, most, at);
}

/* Whether some lane of a mask is set. */
INLINE int some(ints mask)
{
    typedef int64_t pairs __attribute__((vector_size(BYTES)));
    pairs two = (pairs)mask;
    int64_t any = 0;
    for (int i = 0; i < BYTES / 8; i++) any |= two[i];
    return any != 0;
}
