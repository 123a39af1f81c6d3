/* The tokens of each request: appending what a step has committed, and finding what followed the last tokens before. */
#include "../c/vector.h"

struct aerie_append {
    int32_t *history;       /* [rows, width], the tokens of each table row */
    const int64_t *rows;    /* [requests], table rows */
    const int64_t *starts;  /* [requests], position of the first new token */
    const int64_t *lens;    /* [requests], how many of the new tokens count */
    const int64_t *tokens;  /* [requests, wide] */
    int64_t requests, wide, width;
};

void NAMED(aerie_append)(const struct aerie_append *a)
{
    for (int64_t r = 0; r < a->requests; r++) {
        int32_t *history = a->history + a->rows[r] * a->width;
        int64_t start = a->starts[r], stop = start + a->lens[r];
        if (stop > a->width) stop = a->width;
        for (int64_t p = start; p < stop; p++) history[p] = (int32_t)a->tokens[r * a->wide + p - start];
    }
}

struct aerie_continue {
    const int32_t *history; /* [rows, width], the tokens of each table row */
    const int64_t *rows;    /* [requests], table rows */
    const int64_t *lasts;   /* [requests], position of the last token */
    int64_t *tokens;        /* [requests, wide], the result */
    int64_t *matched;       /* [requests], the length of each match, 0 if there is none */
    int64_t requests, wide, width, longest, shortest;
};

/* Of all earlier positions, take the one before which the most tokens (at most `longest`) equal the last tokens of the
 * request; of several, the latest. The tokens after it are the result, repeated where they reach the end. Without a
 * match of `shortest` tokens, the result is the last token, repeated.
 */
void NAMED(aerie_continue)(const struct aerie_continue *a)
{
    for (int64_t r = 0; r < a->requests; r++) {
        const int32_t *history = a->history + a->rows[r] * a->width;
        int64_t last = a->lasts[r] < a->width ? a->lasts[r] : a->width - 1, best = 0, found = last - 1;
        for (int64_t p = last - 1; p >= 0 && best < a->longest; p--) {
            if (history[p] != history[last]) continue;
            int64_t length = 1;
            while (length < a->longest && length <= p && history[p - length] == history[last - length]) length++;
            if (length > best) best = length, found = p;
        }
        if (best < a->shortest) found = last - 1, best = 0;
        a->matched[r] = best;
        int64_t period = last - found;
        for (int64_t j = 0; j < a->wide; j++)
            a->tokens[r * a->wide + j] = history[last > 0 ? found + 1 + j % period : 0];
    }
}
