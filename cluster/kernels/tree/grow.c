/* Growth of draft trees; see `spec/tree.py`, whose `TorchGrowth` is the reference. Of candidates with equal scores, the
 * one with the lower number comes first. Legend: R requests, K topk, C candidates of all levels, N nodes.
 */
#include "../c/vector.h"
#include "../c/scratch.h"
#include "order.h"

struct aerie_level {
    const int64_t *proposals;            /* [R, K, K]: K tokens after each of the rows that ran last; level 1: [R, K] */
    const real *log_probabilities;       /* of the proposals */
    int64_t *tokens, *parents;           /* [R, C]; a parent is a candidate number, or -1 for the root */
    real *scores;                        /* [R, C] */
    const int64_t *row_numbers;          /* [R, K]: candidate numbers of the rows that ran last; not read in level 1 */
    const real *row_scores;              /* [R, K]: their scores; not read in level 1 */
    int64_t *next_tokens, *next_rows;    /* [R, K]: the best candidates of the level, and their parents' rows */
    int64_t *next_numbers;               /* [R, K]: their candidate numbers */
    real *next_scores;                   /* [R, K] */
    int64_t requests, topk, candidates;
    int64_t first;                       /* number of the level's first candidate; 0 in level 1 */
    double floor, decay;
};

/* Adds the candidates of one level, and selects the K best of them: the rows of the next level. In level 1 these are
 * all its candidates, in order. score = score of the row + clamp(log-probability, floor, 0) - decay, where NaN counts
 * as floor.
 */
void NAMED(aerie_level)(const struct aerie_level *a)
{
    int64_t k = a->topk, rows = a->first ? k : 1, count = rows * k;
    real floor = (real)a->floor, decay = (real)a->decay;
    struct candidate *order = aerie_scratch(0, 2 * sizeof *order * count);
    for (int64_t r = 0; r < a->requests; r++) {
        int64_t begin = r * a->candidates + a->first;
        for (int64_t i = 0; i < count; i++) {
            real x = a->log_probabilities[r * count + i];
            x = x >= floor ? x : floor; /* NaN too: it compares false */
            x = (x > 0 ? 0 : x) - decay;
            int64_t row = r * k + i / k;
            if (a->first) x = a->row_scores[row] + x;
            a->tokens[begin + i] = a->proposals[r * count + i];
            a->parents[begin + i] = a->first ? a->row_numbers[row] : -1;
            a->scores[begin + i] = x;
            order[i] = (struct candidate){x, i};
        }
        if (a->first) sort(order, order + count, count);
        for (int64_t i = 0; i < k; i++) {
            int64_t best = order[i].number;
            a->next_tokens[r * k + i] = a->tokens[begin + best];
            a->next_rows[r * k + i] = best / k;
            a->next_numbers[r * k + i] = a->first + best;
            a->next_scores[r * k + i] = order[i].score;
        }
    }
}

struct aerie_keep {
    const int64_t *tokens, *parents;     /* [R, C], as `aerie_level` writes them */
    const real *scores;                  /* [R, C] */
    const int64_t *bonus;                /* [R]: the tokens of the roots */
    int64_t *node_tokens, *node_parents, *node_depths; /* [R, N] */
    real *node_scores;                   /* [R, N] */
    int64_t *kept;                       /* [R, N - 1]: the candidate numbers of the nodes, without the root */
    uint8_t *ancestors;                  /* [R, N, N]: whether the column's node is the row's node or its ancestor */
    int64_t requests, candidates, nodes;
};

/* Keeps the root and the N - 1 candidates with the best scores, in ascending order of their numbers. A parent has a
 * better score than its child, so it is kept too, and comes first.
 */
void NAMED(aerie_keep)(const struct aerie_keep *a)
{
    int64_t n = a->nodes, count = a->candidates;
    struct candidate *order = aerie_scratch(0, 2 * sizeof *order * (count + 1));
    int64_t *node_of = aerie_scratch(1, sizeof *node_of * (count + 1)); /* node numbers of the kept candidates */
    for (int64_t r = 0; r < a->requests; r++) {
        const int64_t *tokens = a->tokens + r * count, *parents = a->parents + r * count;
        const real *scores = a->scores + r * count;
        int64_t *node_tokens = a->node_tokens + r * n, *node_parents = a->node_parents + r * n;
        int64_t *node_depths = a->node_depths + r * n, *kept = a->kept + r * (n - 1), node = 1;
        real *node_scores = a->node_scores + r * n;
        uint8_t *ancestors = a->ancestors + r * n * n;
        for (int64_t i = 0; i < count; i++) order[i] = (struct candidate){scores[i], i};
        sort(order, order + count, count);
        memset(node_of, 0, sizeof *node_of * count);
        for (int64_t i = 0; i < n - 1; i++) node_of[order[i].number] = 1;
        memset(ancestors, 0, n * n);
        node_tokens[0] = a->bonus[r], node_parents[0] = node_depths[0] = 0, node_scores[0] = 0, ancestors[0] = 1;
        for (int64_t i = 0; i < count; i++) {
            if (!node_of[i]) continue;
            int64_t parent = parents[i] < 0 ? 0 : node_of[parents[i]];
            node_tokens[node] = tokens[i], node_scores[node] = scores[i], kept[node - 1] = i;
            node_parents[node] = parent, node_depths[node] = node_depths[parent] + 1;
            memcpy(ancestors + node * n, ancestors + parent * n, n);
            ancestors[node * n + node] = 1;
            node_of[i] = node++;
        }
    }
}
