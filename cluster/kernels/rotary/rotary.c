/* RMS norm of queries and keys, and their rotary embedding, in place. */
#include "../c/rms.h"
#include "../c/threads.h"

struct job {
    stored *packed;
    const stored *cosine, *sine;
    int64_t count, stride, apart, heads, kv_heads, size, turned;
    struct scale q_scale, k_scale;
};

static void part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    int64_t half = j->turned / 2, even = half / EACH * EACH;
    for (int64_t row = j->count * part / parts; row < j->count * (part + 1) / parts; row++) {
        const stored *cosine = j->cosine + row * j->turned, *sine = j->sine + row * j->turned;
        for (int64_t h = 0; h < j->heads + j->kv_heads; h++) {
            stored *low = j->packed + row * j->stride + h * j->apart, *high = low + half;
            const struct scale *scale = h < j->heads ? &j->q_scale : &j->k_scale;
            if (scale->at) rms_norm(low, low, j->size, scale);
            int64_t i = 0;
            for (; i < even; i += EACH) {
                vec a = load(low + i), b = load(high + i);
                save(low + i, a * load(cosine + i) + b * load(sine + i));
                save(high + i, b * load(cosine + half + i) + a * load(sine + half + i));
            }
            for (; i < half; i++) {
                real a = get(low + i), b = get(high + i);
                put(low + i, fused(a, get(cosine + i), b * get(sine + i)));
                put(high + i, fused(b, get(cosine + half + i), a * get(sine + half + i)));
            }
        }
    }
}

/* packed [count, heads + kv_heads, size] has the queries, then the keys. Its rows are `stride` numbers apart, its heads
 * `apart` numbers. The first `turned` numbers of each head are rotated by cosine and sine [count, turned]: the low half
 * becomes low cos + high sin, the high half high cos + low sin; the sines of the low half are negated. Before that,
 * heads are normed with q_scale and k_scale [size], unless these are NULL.
 */
void NAMED(aerie_rotary)(stored *packed, const stored *cosine, const stored *sine, const void *q_scale,
                         const void *k_scale, int64_t count, int64_t stride, int64_t apart, int64_t heads, int64_t kv_heads,
                         int64_t size, int64_t turned, int64_t wide, double eps, int64_t threads)
{
    struct job j = {packed, cosine, sine, count, stride, apart, heads, kv_heads, size, turned, {q_scale, wide, eps}, {k_scale, wide, eps}};
    int64_t enough = 1 + count * (heads + kv_heads) * size / 16384;
    aerie_spread(part, &j, threads < enough ? threads : enough);
}
