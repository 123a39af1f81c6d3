/* Looked-up tokens in drafted trees; see `spec/lookup.py`, whose torch operators are the reference.
 * Legend: R requests, n nodes of each drafted tree, L looked-up tokens of each request.
 */
#include "../c/vector.h"
#include "../c/scratch.h"

struct aerie_match_chances {
    const float *trials, *hits;  /* [longest + 1], by the length of the match before a token */
    const int64_t *matched;      /* [R] */
    float *out;                  /* [R, L]: the logarithms of the chances */
    int64_t requests, count, longest;
    double prior;
};

INLINE int64_t length_of(int64_t matched, int64_t before, int64_t longest)
{
    return matched + before < longest ? matched + before : longest;
}

void NAMED(aerie_match_chances)(const struct aerie_match_chances *a)
{
    float *curve = aerie_scratch(0, (a->longest + 1) * sizeof *curve), prior = (float)a->prior;
    for (int64_t i = 0; i <= a->longest; i++) {
        float chance = (a->hits[i] + prior * (float)i / (float)(i + 1)) / (a->trials[i] + prior);
        curve[i] = (float)log(chance < 1e-6f ? 1e-6f : chance);
    }
    for (int64_t i = 0; i < a->requests * a->count; i++)
        a->out[i] = curve[length_of(a->matched[i / a->count], i % a->count, a->longest)];
}

struct aerie_match_count {
    float *trials, *hits;
    const int64_t *matched, *agreeing, *accept_len, *limits; /* [R] each */
    int64_t requests, longest;
    double kept;
};

/* Multiplies all counts by `kept`, then counts the looked-up tokens of which it is known whether they were right. */
void NAMED(aerie_match_count)(const struct aerie_match_count *a)
{
    for (int64_t i = 0; i <= a->longest; i++) a->trials[i] *= (float)a->kept, a->hits[i] *= (float)a->kept;
    for (int64_t r = 0; r < a->requests; r++) {
        if (a->limits[r] <= 0 || a->matched[r] <= 0) continue;
        int64_t known = a->agreeing[r] + 1 < a->accept_len[r] ? a->agreeing[r] + 1 : a->accept_len[r];
        for (int64_t i = 0; i < known && i < a->longest; i++) {
            int64_t length = length_of(a->matched[r], i, a->longest);
            a->trials[length] += 1;
            a->hits[length] += i < a->agreeing[r];
        }
    }
}

struct aerie_add_looked_up {
    const int64_t *tokens, *parents, *depths;  /* [R, n] */
    const uint8_t *ancestors;                  /* [R, n, n] */
    const real *scores;                        /* [R, n], or NULL */
    const int64_t *found, *matched;            /* [R, L], [R] */
    const real *log_chances;                   /* [R, L]; not read without scores */
    int64_t *new_tokens, *new_parents, *new_depths; /* [R, n + L] */
    uint8_t *new_ancestors;                    /* [R, n + L, n + L] */
    real *new_scores;                          /* [R, n + L]; not written without scores */
    int64_t requests, nodes, count;
    double floor, decay;
};

/* The rows of one request: those of the drafted nodes, then those of the looked-up tokens. */
static void add_to_tree(const struct aerie_add_looked_up *a, int64_t r, uint8_t *shared, real *text_scores)
{
    int64_t n = a->nodes, count = a->count, all = n + count, last = 0, last_node = 0, has_match = a->matched[r] > 0;
    const int64_t *found = a->found + r * count;
    int64_t *tokens = a->new_tokens + r * all, *parents = a->new_parents + r * all, *depths = a->new_depths + r * all;
    uint8_t *ancestors = a->new_ancestors + r * all * all;
    real *scores = a->scores ? a->new_scores + r * all : NULL;
    memcpy(tokens, a->tokens + r * n, n * sizeof *tokens);
    memcpy(parents, a->parents + r * n, n * sizeof *parents);
    memcpy(depths, a->depths + r * n, n * sizeof *depths);
    memset(ancestors, 0, all * all);
    double sum = 0; /* in double, as in torch's cumsum */
    text_scores[0] = 0;
    for (int64_t depth = 1; scores && depth <= count; depth++) {
        real x = a->log_chances[r * count + depth - 1];
        x = x >= (real)a->floor ? x : (real)a->floor;
        x = (x > 0 ? 0 : x) - (real)a->decay;
        text_scores[depth] = (real)(sum += x);
    }
    for (int64_t i = 0; i < n; i++) { /* a node is shared if its path is the beginning of the looked-up text */
        int on_text = i == 0 || (depths[i] > 0 && depths[i] <= count && found[depths[i] - 1] == tokens[i]);
        shared[i] = has_match && on_text && (parents[i] == i || shared[parents[i]]);
        if (shared[i] && depths[i] > last) last = depths[i], last_node = i;
        memcpy(ancestors + i * all, a->ancestors + (r * n + i) * n, n);
        if (!scores) continue;
        real score = a->scores[r * n + i];
        scores[i] = shared[i] && depths[i] && text_scores[depths[i]] > score ? text_scores[depths[i]] : score;
    }
    for (int64_t depth = 1; depth <= count; depth++) {
        int64_t node = n - 1 + depth, is_new = has_match && depth > last;
        tokens[node] = is_new ? found[depth - 1] : 0;
        depths[node] = is_new ? depth : 0;
        /* The first new node follows the last shared node; a place without a new node is padding, its own parent. */
        parents[node] = !is_new ? node : depth == last + 1 ? last_node : node - 1;
        if (scores) scores[node] = is_new ? text_scores[depth] : (real)-INFINITY;
        if (is_new) memcpy(ancestors + node * all, depth == last + 1 ? shared : ancestors + (node - 1) * all, n);
        for (int64_t other = last + 1; is_new && other < depth; other++) ancestors[node * all + n - 1 + other] = 1;
        ancestors[node * all + node] = 1;
    }
}

void NAMED(aerie_add_looked_up)(const struct aerie_add_looked_up *a)
{
    uint8_t *shared = aerie_scratch(0, a->nodes);
    real *text_scores = aerie_scratch(1, (a->count + 1) * sizeof *text_scores);
    for (int64_t r = 0; r < a->requests; r++) add_to_tree(a, r, shared, text_scores);
}
