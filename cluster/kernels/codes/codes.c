/* Products of rows and quantised matrices:
 *
 *     out[m][n] = bias[n] + sum over groups g of scale[g][n] * (sum over k in g of rows[m][k] * (code[k][n] - zero[g][n]))
 *
 * The inner sum goes turn by turn (see unpack.h), the outer one group by group, in the same order for any number of
 * rows. Codes, scales and zeros are stored in panels of LANES columns: scales and zeros [panel][group][LANES], codes
 * [panel][k][LANES] in bytes, [panel][k / 2][LANES] with two inputs a byte (FP4), or [panel][k / 8][LANES] in words
 * (INT4).
 */
#include "../c/finish.h"
#include "../c/scratch.h"
#include "../c/threads.h"
#include "unpack.h"

struct job {
    const stored *rows;
    const uint8_t *codes;
    const void *scales;
    const uint8_t *zeros; /* NULL: the middle of the range */
    const stored *bias;
    stored *out;
    int64_t m, k, n, group;
    int kind, wide;
    const int32_t *ends; /* where each expert's rows end; NULL: there is one matrix */
    int64_t experts;
    int64_t bytes, turns, groups, panels; /* of a panel: bytes, turns, groups; panels of a matrix */
};

/* Bytes of `inputs` inputs of a panel: a multiple of a step's inputs, or all of them. */
INLINE int64_t bytes_of(int kind, int64_t inputs)
{
    return (kind == INT4 ? (inputs + 7) / 8 * 4 : kind == FP4 ? (inputs + 1) / 2 : inputs) * LANES;
}

#ifdef TILES
#include "tiles.h"
#else
#include "registers.h"
#endif

static void part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    int64_t start = 0, first = j->panels * part / parts, last = j->panels * (part + 1) / parts;
    for (int64_t e = 0; e < j->experts; e++) {
        int64_t end = j->ends ? j->ends[e] : j->m;
        if (end > start) some(j, e, j->rows + start * j->k, j->out + start * j->n, end - start, first, last);
        start = end;
    }
}

/* rows [m, k]; codes, scales and zeros (or NULL) in panels, expert after expert; bias [experts, n] or NULL; ends
 * [experts] or NULL. `group` inputs share a scale: a multiple of 8, unless there is one group. `wide`: scales are
 * float32, else bfloat16.
 */
void NAMED(aerie_codes)(const stored *rows, const uint8_t *codes, const void *scales, const uint8_t *zeros,
                        const stored *bias, stored *out, int64_t m, int64_t k, int64_t n, int64_t group, int64_t kind,
                        int64_t wide, const int32_t *ends, int64_t experts, int64_t threads)
{
    int64_t each = inputs_of((int)kind), turns = (k + each - 1) / each * turns_of((int)kind);
    struct job j = {rows, codes, scales, zeros, bias, out, m, k, n, group, (int)kind, (int)wide, ends, experts,
                    bytes_of((int)kind, k), turns, (k + group - 1) / group, (n + LANES - 1) / LANES};
    int64_t enough = 1 + m * k * n / 65536;
    aerie_spread(part, &j, threads < enough ? threads : enough);
}
