/* The best tokens of rows of logits. Scores are computed in registers and never written; see `scores.h`.
 *
 * Noise takes two logarithms; its hash takes few instructions. So a token is scored only if an upper bound of its
 * score, which needs no logarithm, says that it could be among the best. This does not change the result.
 */
#include "scores.h"

/* What a call returns. BEST: the best tokens and their scores. LIKELIEST: the best tokens and their log-probabilities.
 * FOUND: the best tokens, their scores, and the log-sum-exp of all scores of the row.
 */
enum { BEST, LIKELIEST, FOUND };

#define SEVERAL 4  /* vectors whose bounds are tested together */
#define BLOCK 2048 /* tokens of a row that are summed together */

/* The best tokens of the columns read so far, the highest score first; of equal scores, the lower column first. */
struct best {
    real score[MOST];
    int64_t column[MOST], held, count;
    int64_t bad; /* the first column that is NaN; -1: none */
};

INLINE void take(struct best *b, real score, int64_t column)
{
    if (b->held == b->count && !(score > b->score[b->count - 1])) return;
    int64_t at = b->held < b->count ? b->held++ : b->count - 1;
    for (; at > 0 && score > b->score[at - 1]; at--) b->score[at] = b->score[at - 1], b->column[at] = b->column[at - 1];
    b->score[at] = score, b->column[at] = column;
}

/* Returns whether one of the numbers `x` (scores, or upper bounds of scores) may be among the best. NaN may be. */
INLINE int matters(const struct best *b, vec x)
{
    return b->held < b->count || some(~(x <= b->score[b->count - 1]));
}

/* Takes the best of EACH columns; returns 0 if one of them is NaN. */
INLINE int take_each(const struct row *row, int noisy, int64_t at, struct best *b)
{
    if (!matters(b, bounds_at(row, noisy, at))) return 1;
    vec exact = scores_at(row, noisy, at);
    if (!matters(b, exact)) return 1;
    int64_t count = row->size - at < EACH ? row->size - at : EACH;
    for (int64_t i = 0; i < count; i++) {
        if (exact[i] != exact[i]) {
            b->bad = at + i;
            return 0;
        }
        take(b, exact[i], at + i);
    }
    return 1;
}

INLINE void rank(const struct row *row, int noisy, struct best *b)
{
    for (int64_t at = 0; at < row->size; at += SEVERAL * EACH) {
        int64_t stop = at + SEVERAL * EACH < row->size ? at + SEVERAL * EACH : row->size;
        if (b->held == b->count) {
            ints over = {0};
            for (int i = 0; i < SEVERAL; i++)
                over |= ~(bounds_at(row, noisy, at + i * EACH) <= b->score[b->count - 1]);
            if (!some(over)) continue;
        }
        for (int64_t i = at; i < stop; i += EACH)
            if (!take_each(row, noisy, i, b)) return;
    }
}

/* The sum of exp(score - most) over the row, in LANES lanes. Summed in blocks, since a long sum would absorb small
 * terms.
 */
INLINE real total(const struct row *row, int noisy, real most)
{
    lanes sum = {{{0}}};
    int passes = barred_weigh_nothing(row, most);
    for (int64_t begin = 0; begin < row->size; begin += BLOCK) {
        lanes some = {{{0}}};
        for (int64_t at = begin; at < row->size && at < begin + BLOCK; at += LANES) {
            if (passes && none_allowed(row, at)) continue;
            vec x[FOLDS];
            for (int f = 0; f < FOLDS; f++) x[f] = weights_at(row, noisy, most, at + f * EACH);
            for (int f = 0; f < FOLDS; f++) some.part[f] += x[f];
        }
        for (int f = 0; f < FOLDS; f++) sum.part[f] += some.part[f];
    }
    return summed(sum);
}

INLINE void finish(const struct aerie_choice *c, int64_t number, const struct row *row, const struct best *b)
{
    real *scores = c->scores + number * c->count, most = b->bad < 0 ? b->score[0] : (real)NAN, whole = most;
    int64_t *columns = c->columns + number * c->count;
    int finite = most - most == 0;
    if (finite && c->kind != BEST)
        whole += logarithm_of_one(row->noisy ? total(row, 1, most) : total(row, 0, most));
    for (int64_t k = 0; k < c->count; k++) {
        columns[k] = b->column[k], scores[k] = b->score[k];
        if (b->bad >= 0) columns[k] = c->kind == BEST ? b->bad : k, scores[k] = (real)NAN;
        if (c->kind == LIKELIEST) scores[k] = finite ? scores[k] - whole : (real)NAN;
        if (c->kind == LIKELIEST && !finite) columns[k] = k;
    }
    if (c->kind == FOUND) c->total[number] = whole;
}

static void part(const void *data, int64_t part, int64_t parts)
{
    const struct aerie_choice *c = data;
    int64_t rows = c->requests * c->each;
    for (int64_t number = rows * part / parts; number < rows * (part + 1) / parts; number++) {
        struct row row = row_of(c, number);
        struct best best = {.count = c->count, .bad = -1};
        if (row.noisy)
            rank(&row, 1, &best);
        else
            rank(&row, 0, &best);
        finish(c, number, &row, &best);
    }
}

void NAMED(aerie_choice)(const struct aerie_choice *c)
{
    int64_t enough = 1 + c->requests * c->each * c->size / 8192;
    aerie_spread(part, c, c->threads < enough ? c->threads : enough);
}
