/* Output of the sums of a product. */
#pragma once
#include "vector.h"

/* Adds the bias, if there is one, to the sums `x` of EACH columns, and writes them. If only `columns` columns, fewer
 * than EACH, are left in the matrix, writes only these.
 */
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
