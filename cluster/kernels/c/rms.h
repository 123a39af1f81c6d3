/* RMS norm of one row: x / sqrt(mean(x^2) + eps) * scale. */
#pragma once
#include "vector.h"

struct scale {
    const void *at; /* the scale's numbers; NULL: no norm */
    int64_t wide;   /* whether they are of type `real` instead of `stored` */
    double eps;
};

INLINE vec scales(const struct scale *s, int64_t at)
{
    return s->wide ? (vec) * (const loose *)((const real *)s->at + at) : load((const stored *)s->at + at);
}

INLINE void rms_norm(const stored *from, stored *to, int64_t size, const struct scale *s)
{
    int64_t even = size / LANES * LANES;
    lanes squares = {{{0}}};
    for (int64_t i = 0; i < even; i += LANES)
        for (int f = 0; f < FOLDS; f++) {
            vec x = load(from + i + f * EACH);
            squares.part[f] += x * x;
        }
    real rest = 0;
    for (int64_t i = even; i < size; i++) rest = fused(get(from + i), get(from + i), rest);
    real mean = (summed(squares) + rest) / (real)size + (real)s->eps;
    real factor = 1 / (sizeof(real) == 8 ? (real)sqrt((double)mean) : (real)sqrtf((float)mean));
    for (int64_t i = 0; i < even; i += EACH) save(to + i, load(from + i) * factor * scales(s, i));
    for (int64_t i = even; i < size; i++) {
        real scale = s->wide ? ((const real *)s->at)[i] : get((const stored *)s->at + i);
        put(to + i, get(from + i) * factor * scale);
    }
}
