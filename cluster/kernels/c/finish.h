/* Output of the sums of a product. */
#pragma once
#include "vector.h"

/* Writes the sums of EACH columns, plus bias; only `columns` of them if the last panel has fewer. */
INLINE void finish(stored *out, const stored *bias, int64_t columns, vec x)
{
    if (columns >= EACH) {
        save(out, bias ? x + load(bias) : x);
        return;
    }
    real apart[EACH]; /* a copy: indexing `x` itself would make the compiler keep sums in memory during the loop */
    *(loose *)apart = x;
    for (int i = 0; i < columns; i++) put(out + i, bias ? apart[i] + get(bias + i) : apart[i]);
}
