/* Applies a token bitmask to logits: tokens that a grammar does not allow are masked out. */
#include "../c/threads.h"
#include "bars.h"

struct job {
    const stored *logits;
    const int32_t *masks;
    const int64_t *ids;
    real *out;
    int64_t count, size, stride, words;
    real barred;
};

/* Masks the tokens of one word: WORD tokens, or `left` if these are fewer. */
INLINE void of_word(const stored *from, real *out, uint32_t bits, int64_t left, const real *more)
{
    if (left < WORD) {
        for (int64_t i = 0; i < left; i++) out[i] = get(from + i) + more[bits >> i & 1];
        return;
    }
    for (int i = 0; i < WORD; i += EACH) *(loose *)(out + i) = barred(load(from + i), bits >> i, more);
}

static void part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    for (int64_t row = j->count * part / parts; row < j->count * (part + 1) / parts; row++) {
        const stored *from = j->logits + row * j->stride;
        const int32_t *mask = j->masks + row * j->words;
        real *out = j->out + row * j->size, more[2];
        bars_of(mask, j->words, j->barred, more);
        if (j->ids)
            for (int64_t i = 0; i < j->size; i++)
                out[i] = get(from + i) + more[(uint32_t)mask[j->ids[i] / WORD] >> j->ids[i] % WORD & 1];
        else
            for (int64_t begin = 0; begin < j->size; begin += WORD)
                of_word(from + begin, out + begin, (uint32_t)mask[begin / WORD], j->size - begin, more);
    }
}

/* logits [count, size] at `stride`, masks [count, words] -> out [count, size], of type `real`. Column i is token
 * ids[i], or token i if ids is NULL. `barred` is added to the logits of tokens that the mask does not allow. If a mask
 * allows no token, its row becomes NaN.
 */
void NAMED(aerie_bar)(const stored *logits, const int32_t *masks, const int64_t *ids, void *out, int64_t count, int64_t size,
                      int64_t stride, int64_t words, double barred, int64_t threads)
{
    struct job j = {logits, masks, ids, out, count, size, stride, words, (real)barred};
    int64_t enough = 1 + count * size / 32768;
    aerie_spread(part, &j, threads < enough ? threads : enough);
}
