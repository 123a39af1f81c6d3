/* Numbers, vectors and sums of the C kernels, for one kind of number (KIND) and the vector width of the compiler's
 * target. A sum has LANES lanes on every CPU and is folded in one order. So its bits depend neither on the CPU, if it
 * has fused multiply-add, nor on the number of rows in the batch.
 *
 * KIND 32: float. 64: double. 16: bfloat16 in memory (`stored`), float in registers (`real`).
 */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if KIND == 64
typedef double real;
typedef int64_t whole;
#define NAMED(name) name##_f64
#elif KIND == 32
typedef float real;
typedef int32_t whole;
#define NAMED(name) name##_f32
#else
typedef float real;
typedef int32_t whole;
#if defined(TILES)
#define NAMED(name) name##_bf16_tiles
#elif defined(__AVX512BF16__)
#define NAMED(name) name##_bf16_pairs
#else
#define NAMED(name) name##_bf16
#endif
#endif
#if KIND == 16
typedef uint16_t stored;
#else
typedef real stored;
#endif

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define EACH ((int)(BYTES / sizeof(real))) /* numbers in a register */
#define LANES ((int)(64 / sizeof(real)))   /* lanes of a sum, columns of a panel */
#define FOLDS (64 / BYTES)                 /* registers that hold LANES numbers */

typedef real vec __attribute__((vector_size(BYTES)));
typedef real loose __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
typedef whole ints __attribute__((vector_size(BYTES)));
typedef struct { vec part[FOLDS]; } lanes;

/* a * b + c, rounded once if the target has FMA. For scalars, where the compiler would otherwise choose whether to
 * fuse.
 */
INLINE real fused(real a, real b, real c)
{
#if !defined(__FMA__) && !defined(__ARM_FEATURE_FMA)
    return a * b + c;
#elif KIND == 64
    return __builtin_fma(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

INLINE vec all(real x) { return x - (vec){0}; }

#if KIND == 16
typedef uint16_t halves __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(BYTES)));
INLINE vec load(const stored *from) { return (vec)(__builtin_convertvector(*(const halves *)from, words) << 16); }
INLINE void save(stored *to, vec x)
{
    words bits = (words)x;
    words even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words nan = (words)(x != x);
    *(halves *)to = __builtin_convertvector((even & ~nan) | (nan & 0x7fc0), halves);
}
INLINE real get(const stored *from)
{
    uint32_t bits = (uint32_t)*from << 16;
    real x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE void put(stored *to, real x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#else
INLINE vec load(const stored *from) { return *(const loose *)from; }
INLINE void save(stored *to, vec x) { *(loose *)to = x; }
INLINE real get(const stored *from) { return *from; }
INLINE void put(stored *to, real x) { *to = x; }
#endif

/* A sum is first folded to this vector of 16 bytes; the last steps add its numbers. */
typedef real few __attribute__((vector_size(16)));
#if BYTES == 64
typedef real half __attribute__((vector_size(32)));
#endif

/* Adds lane i + LANES / 2 to lane i, then halves again, down to 16 bytes. */
INLINE few folded(lanes x)
{
#if BYTES == 64 && KIND == 64
    half h = __builtin_shufflevector(x.part[0], x.part[0], 0, 1, 2, 3) + __builtin_shufflevector(x.part[0], x.part[0], 4, 5, 6, 7);
    return __builtin_shufflevector(h, h, 0, 1) + __builtin_shufflevector(h, h, 2, 3);
#elif BYTES == 64
    half h = __builtin_shufflevector(x.part[0], x.part[0], 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(x.part[0], x.part[0], 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#elif BYTES == 32 && KIND == 64
    vec h = x.part[0] + x.part[1];
    return __builtin_shufflevector(h, h, 0, 1) + __builtin_shufflevector(h, h, 2, 3);
#elif BYTES == 32
    vec h = x.part[0] + x.part[1];
    return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#else
    return (x.part[0] + x.part[2]) + (x.part[1] + x.part[3]);
#endif
}

INLINE real summed(lanes x)
{
    few f = folded(x);
#if KIND == 64
    return f[0] + f[1];
#else
    return (f[0] + f[2]) + (f[1] + f[3]);
#endif
}

/* Returns the sums of the lanes of x[0] to x[SUMS - 1], bit for bit as `summed` computes each of them. */
#if KIND == 64
#define SUMS 2
INLINE few all_summed(const lanes *x)
{
    few a = folded(x[0]), b = folded(x[1]);
    return __builtin_shufflevector(a, b, 0, 2) + __builtin_shufflevector(a, b, 1, 3);
}
#else
#define SUMS 4
INLINE few all_summed(const lanes *x)
{
    few a = folded(x[0]), b = folded(x[1]), c = folded(x[2]), d = folded(x[3]);
    few ab = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    few cd = __builtin_shufflevector(c, d, 0, 1, 4, 5) + __builtin_shufflevector(c, d, 2, 3, 6, 7);
    return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}
#endif

#if BYTES == 64 && KIND != 64
#define DENSE 1
/* Returns 16 sums, of four lines times four cells, as [line][cell], bit for bit as `summed` computes each of them. It
 * adds the halves of two sums at once, then the quarters of four, and so on. To fold each sum alone would take longer
 * than to compute the products.
 */
INLINE vec sixteen_summed(const vec x[4][4])
{
    vec of[4];
    for (int c = 0; c < 4; c++) {
        vec two[2];
        for (int i = 0; i < 2; i++) {
            vec a = x[2 * i][c], b = x[2 * i + 1][c];
            two[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                     __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        }
        of[c] = __builtin_shufflevector(two[0], two[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                __builtin_shufflevector(two[0], two[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    vec two[2];
    for (int i = 0; i < 2; i++)
        two[i] = __builtin_shufflevector(of[2 * i], of[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                 __builtin_shufflevector(of[2 * i], of[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(two[0], two[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           __builtin_shufflevector(two[0], two[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}
#endif

/* exp(x) within 2 units in the last place; 0 below `least`, infinity above `most`, NaN for NaN. Cody and Waite's
 * reduction x = k log 2 + r, with log 2 in two parts, then exp(x) = 2^k exp(r) with the series of exp on [-log 2 / 2,
 * log 2 / 2].
 */
INLINE vec exponential(vec x)
{
#if KIND == 64
    const real most = 709.4, least = -708.3, shift = 6755399441055744.0;
    const real high = 0.693147180369123816490, low = 1.90821492927058770002e-10;
#else
    const real most = 88.3f, least = -87.3f, shift = 12582912.0f;
    const real high = 0.693359375f, low = -2.12194440e-4f;
#endif
    ints over = x > all(most), under = x < all(least), nan = x != x;
    vec y = (vec)(((ints)x & ~(over | under | nan)));
    vec turns = y * (real)1.44269504088896340736 + shift;
    ints power = (ints)turns - (ints)all(shift);
    turns -= shift;
    vec r = y - turns * high;
    r -= turns * low;
    vec sum;
#if KIND == 64
    sum = all(1.0 / 479001600.0);
    static const double series[] = {1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
                                    1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0};
#else
    sum = all(1.0f / 5040.0f);
    static const float series[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
#endif
    for (size_t i = 0; i < sizeof series / sizeof *series; i++) sum = sum * r + series[i];
#if KIND == 64
    vec scale = (vec)((power + 1023) << 52);
#else
    vec scale = (vec)((power + 127) << 23);
#endif
    sum *= scale;
    sum = (vec)((ints)sum & ~under);
    sum = (vec)(((ints)sum & ~over) | (over & (ints)all((real)INFINITY)));
    return (vec)(((ints)sum & ~nan) | (nan & (ints)x));
}

INLINE real exponential_of(real x) { return exponential(all(x))[0]; }
