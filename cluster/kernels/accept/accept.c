/* The accepted path of each tree, and the target's choices along it. */
#include "../c/vector.h"

struct aerie_accept {
    const int64_t *tokens, *parents, *depths; /* [trees, nodes], rows at a stride of their own */
    const int64_t *chosen;                    /* [trees, nodes], the target's choice after every node */
    int64_t *path, *taken, *lens, *bonus;     /* [trees, wide], [trees, wide], [trees], [trees] */
    int8_t *on;                               /* [nodes], work space: whether a node is on the path */
    int64_t trees, nodes, wide, tokens_stride, parents_stride, depths_stride;
};

/* The root is on the path. Any other node is on the path if its parent is on the path and the target chose the node's
 * token after the parent. One pass suffices, as parents come before their children. A node other than the root that is
 * its own parent is padding.
 */
void NAMED(aerie_accept)(const struct aerie_accept *a)
{
    for (int64_t t = 0; t < a->trees; t++) {
        const int64_t *tokens = a->tokens + t * a->tokens_stride, *parents = a->parents + t * a->parents_stride;
        const int64_t *depths = a->depths + t * a->depths_stride, *chosen = a->chosen + t * a->nodes;
        int64_t *path = a->path + t * a->wide, *taken = a->taken + t * a->wide, held = 0;
        for (int64_t j = 0; j < a->wide; j++) path[j] = 0;
        for (int64_t node = 0; node < a->nodes; node++) {
            int64_t above = parents[node];
            int follows = above != node && a->on[above] && chosen[above] == tokens[node];
            a->on[node] = !node || (follows && depths[node] < a->wide);
            if (!a->on[node]) continue;
            path[depths[node]] = node;
            held++;
        }
        for (int64_t j = 0; j < a->wide; j++) taken[j] = chosen[path[j]];
        a->lens[t] = held;
        a->bonus[t] = taken[held - 1];
    }
}
