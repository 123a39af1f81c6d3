/* Where the sums of a product go. */
#pragma once
#include "vector.h"

/* A sum of EACH columns goes out, of which the last panel may have fewer: `columns` of them. */
INLINE void finish(stored *out, const stored *bias, int64_t columns, vec x)
{
    if (columns >= EACH) {
        save(out, bias ? x + load(bias) : x);
        return;
    }
    real apart[EACH]; /* a sum of which single numbers are taken would be kept in memory from turn to turn */
    *(loose *)apart = x;
    for (int i = 0; i < columns; i++) put(out + i, bias ? apart[i] + get(bias + i) : apart[i]);
}
