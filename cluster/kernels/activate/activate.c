/* Gated activations of gates and ups that lie side by side in a row. */
#include "../c/threads.h"
#include "../c/vector.h"

enum { SILU, GELU_TANH, CLAMPED, CLAMPED_SILU };

struct job {
    const stored *both;
    stored *out;
    int64_t count, size, kind;
    real alpha, limit;
};

INLINE vec least(vec a, vec b) { return (vec)(((ints)a & (a < b)) | ((ints)b & ~(a < b))); }

/* Returns x where it is NaN, and 0 elsewhere. */
INLINE vec only_nan(vec x) { return (vec)((x != x) & (ints)x); }

INLINE vec at_most(vec x, vec limit) { return least(x, limit) + only_nan(x); }

INLINE vec within(vec x, vec limit) { return -least(-least(x, limit), limit) + only_nan(x); }

INLINE vec sigmoid(vec x) { return (real)1 / ((real)1 + exponential(-x)); }

INLINE vec activated(const struct job *j, vec gate, vec up)
{
    if (j->kind == SILU) return gate * sigmoid(gate) * up;
    if (j->kind == GELU_TANH) {
        /* x (1 + tanh(y)) / 2 = x sigmoid(2 y) */
        vec y = (real)0.79788456080286535588 * (gate + (real)0.044715 * gate * gate * gate);
        return gate * sigmoid(y + y) * up;
    }
    vec limit = all(j->limit);
    if (j->kind == CLAMPED_SILU) return at_most(gate * sigmoid(gate), limit) * within(up, limit);
    gate = at_most(gate, limit);
    return (within(up, limit) + (real)1) * gate * sigmoid(gate * j->alpha);
}

static void part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    int64_t size = j->size;
    for (int64_t row = j->count * part / parts; row < j->count * (part + 1) / parts; row++) {
        const stored *gate = j->both + row * 2 * size, *up = gate + size;
        stored *out = j->out + row * size;
        int64_t i = 0;
        for (; i + EACH <= size; i += EACH) save(out + i, activated(j, load(gate + i), load(up + i)));
        if (i < size) {
            stored rest[3][EACH];
            memset(rest, 0, sizeof rest);
            memcpy(rest[0], gate + i, (size - i) * sizeof(stored));
            memcpy(rest[1], up + i, (size - i) * sizeof(stored));
            save(rest[2], activated(j, load(rest[0]), load(rest[1])));
            memcpy(out + i, rest[2], (size - i) * sizeof(stored));
        }
    }
}

/* both [count, 2 size] -> out [count, size]. */
void NAMED(aerie_activate)(const stored *both, stored *out, int64_t count, int64_t size, int64_t kind, double alpha,
                           double limit, int64_t threads)
{
    struct job j = {both, out, count, size, kind, (real)alpha, (real)limit};
    int64_t enough = 1 + count * size / 8192;
    aerie_spread(part, &j, threads < enough ? threads : enough);
}
