/* Which nodes of all trees a step verifies; see `spec/row_budget.py`. */
#include "../c/vector.h"
#include "../c/scratch.h"

struct aerie_select {
    const void *scores;                  /* [trees, nodes], of type real */
    const int64_t *depths, *limits;      /* [trees, nodes], rows at a stride of their own; [trees] */
    int64_t *selected, *requests;        /* [count] each: numbers of the nodes in ascending order, their trees */
    int64_t *rows, *ranks;               /* [trees, nodes] each */
    int64_t trees, nodes, count, depths_stride;
    double penalty;                      /* subtracted from the scores of nodes that are deeper than the limit */
};

struct candidate {
    real score;
    int64_t number;
};

static int better(const struct candidate *a, const struct candidate *b)
{
    return a->score > b->score || (a->score == b->score && a->number < b->number);
}

/* Sorts by score, the best first; merges runs of 1, 2, 4, .. candidates. The result is in `from`; `to` is work space. */
static void sort(struct candidate *from, struct candidate *to, int64_t count)
{
    struct candidate *result = from;
    for (int64_t run = 1; run < count; run *= 2) {
        for (int64_t begin = 0; begin < count; begin += 2 * run) {
            int64_t middle = begin + run < count ? begin + run : count, end = middle + run < count ? middle + run : count;
            for (int64_t i = begin, j = middle, k = begin; k < end; k++)
                to[k] = j >= end || (i < middle && better(from + i, from + j)) ? from[i++] : from[j++];
        }
        struct candidate *other = from;
        from = to, to = other;
    }
    if (from != result) memcpy(result, from, count * sizeof *from);
}

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
