/* Which nodes of all trees a step verifies; see `spec/row_budget.py`. */
#include "../c/vector.h"
#include "../c/scratch.h"
#include "order.h"

struct aerie_select {
    const void *scores;                  /* [trees, nodes], of type real */
    const int64_t *depths, *limits;      /* [trees, nodes], rows at a stride of their own; [trees] */
    int64_t *selected, *requests;        /* [count] each: numbers of the nodes in ascending order, their trees */
    int64_t *rows, *ranks;               /* [trees, nodes] each */
    int64_t trees, nodes, count, depths_stride;
    double penalty;                      /* subtracted from the scores of nodes that are deeper than the limit */
};

/* Roots come first, then all other nodes in order of score. Each `trees` places are one more node on average. */
void NAMED(aerie_select)(const struct aerie_select *a)
{
    const real *scores = a->scores;
    int64_t all = a->trees * a->nodes, others = all - a->trees, at = 0;
    struct candidate *order = aerie_scratch(0, 2 * sizeof *order * (others + 1));
    for (int64_t number = 0; number < all; number++) {
        int64_t tree = number / a->nodes, node = number % a->nodes;
        int deeper = a->depths[tree * a->depths_stride + node] > a->limits[tree];
        a->ranks[number] = 0;
        if (node) order[at++] = (struct candidate){scores[number] - (deeper ? (real)a->penalty : 0), number};
    }
    sort(order, order + others, others);
    for (int64_t place = 0; place < others; place++) a->ranks[order[place].number] = a->trees + place;
    at = 0;
    for (int64_t number = 0; number < all; number++) {
        int64_t place = a->ranks[number];
        a->ranks[number] = place / a->trees; /* a root has place 0 here, so its rank is 0 too */
        a->rows[number] = place < a->count ? at : 0;
        if (place >= a->count) continue;
        a->selected[at] = number;
        a->requests[at++] = number / a->nodes;
    }
}
