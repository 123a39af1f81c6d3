/* out[m][n] = sum over k of rows[m][k] * weight[k][n], + bias[n]. Each sum is one chain of turns in ascending k, for
 * any number of rows. A weight is stored in panels of LANES columns: panels[column / LANES][k][column % LANES]; for AMX
 * see tiles.h.
 */
#include "../c/finish.h"
#include "../c/scratch.h"
#include "../c/threads.h"

#define BROAD 256 /* the most panels that have unfinished sums at a time; it limits the memory of these sums */

struct job {
    const stored *rows, *panels, *bias;
    stored *out;
    int64_t m, k, n;
    const int32_t *ends; /* where each expert's rows end; NULL: there is one matrix */
    int64_t experts;
    int64_t bands; /* bands of rows; each part has some columns of one band */
};

#ifdef TILES
#include "tiles.h"
#else
#include "registers.h"
#endif

static void part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    int64_t across = parts / j->bands, band = part / across, panels = (j->n + LANES - 1) / LANES;
    int64_t first = panels * (part % across) / across, last = panels * (part % across + 1) / across;
    int64_t start = j->m * band / j->bands;
    for (int64_t e = 0; e < j->experts; e++) {
        int64_t end = j->ends ? j->ends[e] : j->m * (band + 1) / j->bands;
        for (int64_t from = first; end > start && from < last; from += BROAD)
            some(j, j->rows + start * j->k, j->panels + e * panels * LANES * INPUTS(j->k), j->bias,
                 j->out + start * j->n, end - start, from, from + BROAD < last ? from + BROAD : last);
        start = end;
    }
}

/* With many rows, each thread computes some of the rows, and these are the same rows in all kernels of a layer (also in
 * norms and activations). So a core reads what it wrote itself, not what a core wrote with which it may share no cache.
 * With few rows, each thread computes some of the columns.
 *
 * rows [m, k], panels [experts, ceil(n / LANES), k, LANES], bias [n] or NULL (NULL with experts), ends [experts] or NULL.
 */
void NAMED(aerie_product)(const stored *rows, const stored *panels, const stored *bias, stored *out, int64_t m, int64_t k,
                          int64_t n, const int32_t *ends, int64_t experts, int64_t threads)
{
    int64_t enough = 1 + m * k * n / 65536, parts = threads < enough ? threads : enough;
    struct job j = {rows, panels, bias, out, m, k, n, ends, experts, 1};
    for (int64_t bands = 2; !ends && bands <= parts && m / bands >= BAND; bands++)
        if (parts % bands == 0) j.bands = bands;
    aerie_spread(part, &j, parts);
}
