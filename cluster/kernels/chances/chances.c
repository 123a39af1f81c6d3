/* The chances that drafted nodes are accepted; see `spec/chances.py`, whose torch operators are the reference.
 * Logarithms and exponentials are computed in double, so that all CPUs with fused multiply-add give the
 * same results.
 */
#include "../c/vector.h"
#include "../c/scratch.h"

/* Returns the place of a log-probability on a curve: the square root of the probability, times points - 1. */
INLINE real place_of(real log_probability, int64_t points)
{
    double x = log_probability;
    x = x != x ? -100 : x > 0 ? 0 : x;
    return (real)exp(0.5 * x) * (real)(points - 1);
}

/* Curves [2, 2, points], by [greedy or sampled, likeliest or not, point]. */
struct aerie_chances {
    const float *trials, *hits;
    const real *log_probabilities; /* [requests, rows, topk] of the topk tokens after each row, the likeliest first */
    const uint8_t *sampled;        /* [requests] */
    real *out;                     /* as log_probabilities: the logarithms of the chances */
    int64_t requests, rows, topk, points;
    double prior, least;
};

void NAMED(aerie_chances)(const struct aerie_chances *a)
{
    int64_t points = a->points;
    real *curves = aerie_scratch(0, 4 * points * sizeof *curves);
    for (int64_t i = 0; i < 4 * points; i++) {
        float root = (float)(i % points) / (float)(points - 1), prior = (float)a->prior;
        float chance = (a->hits[i] + prior * (i < points ? root : root * root)) / (a->trials[i] + prior);
        curves[i] = (real)(float)log(chance < (float)a->least ? (float)a->least : chance);
    }
    int64_t each = a->rows * a->topk;
    for (int64_t i = 0; i < a->requests * each; i++) {
        const real *curve = curves + (2 * a->sampled[i / each] + (i % a->topk != 0)) * points;
        real place = place_of(a->log_probabilities[i], points), last = (real)(points - 1) - (real)1e-3;
        if (place > last) place = last;
        int64_t lower = (int64_t)place;
        a->out[i] = curve[lower] + (place - (real)lower) * (curve[lower + 1] - curve[lower]);
    }
}

struct aerie_count {
    float *trials, *hits;           /* as above */
    const real *log_probabilities;  /* [requests, drafted] */
    const uint8_t *is_likeliest;    /* [requests, drafted] */
    const int64_t *tokens, *parents; /* [requests, nodes], rows at strides */
    const int64_t *path;            /* [requests, path_length], padded with 0, the root */
    const uint8_t *sampled;         /* [requests] */
    const int64_t *limits;          /* [requests]; requests with limit 0 do not count */
    int64_t requests, drafted, nodes, path_length, points, tokens_stride, parents_stride, no_token;
    double kept;
};

/* Multiplies all counts by `kept`, then counts the nodes whose parents were accepted, and those that were accepted. */
void NAMED(aerie_count)(const struct aerie_count *a)
{
    uint8_t *on_path = aerie_scratch(0, a->nodes);
    for (int64_t i = 0; i < 4 * a->points; i++) a->trials[i] *= (float)a->kept, a->hits[i] *= (float)a->kept;
    for (int64_t r = 0; r < a->requests; r++) {
        if (a->limits[r] <= 0) continue;
        const int64_t *tokens = a->tokens + r * a->tokens_stride, *parents = a->parents + r * a->parents_stride;
        memset(on_path, 0, a->nodes);
        for (int64_t i = 0; i < a->path_length; i++) on_path[a->path[r * a->path_length + i]] = 1;
        for (int64_t node = 1; node < a->drafted; node++) {
            if (tokens[node] == a->no_token || !on_path[parents[node]]) continue;
            int64_t i = r * a->drafted + node, curve = 2 * a->sampled[r] + !a->is_likeliest[i];
            int64_t at = curve * a->points + (int64_t)rint((double)place_of(a->log_probabilities[i], a->points));
            a->trials[at] += 1;
            a->hits[at] += on_path[node];
        }
    }
}
