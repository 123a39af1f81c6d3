/* RMS norm of rows, or of sums of two rows. */
#include "../c/rms.h"
#include "../c/threads.h"

struct job {
    const stored *rows, *more;
    stored *sums, *out;
    int64_t count, size, stride;
    struct scale scale;
};

static void part(const void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    int64_t size = j->size, even = size / EACH * EACH;
    for (int64_t row = j->count * part / parts; row < j->count * (part + 1) / parts; row++) {
        const stored *from = j->rows + row * j->stride;
        if (j->more) {
            const stored *more = j->more + row * size;
            stored *sum = j->sums + row * size;
            for (int64_t i = 0; i < even; i += EACH) save(sum + i, load(from + i) + load(more + i));
            for (int64_t i = even; i < size; i++) put(sum + i, get(from + i) + get(more + i));
            from = sum;
        }
        rms_norm(from, j->out + row * size, size, &j->scale);
    }
}

/* rows [count, size] at `stride`, more [count, size] or NULL -> sums = rows + more (unless NULL), and out, the norm.
 * `wide`: scale [size] is of type `real`, else `stored`.
 */
void NAMED(aerie_norm)(const stored *rows, const stored *more, const void *scale, stored *sums, stored *out, int64_t count,
                       int64_t size, int64_t stride, int64_t wide, double eps, int64_t threads)
{
    struct job j = {rows, more, sums, out, count, size, stride, {scale, wide, eps}};
    int64_t enough = 1 + count * size / 16384;
    aerie_spread(part, &j, threads < enough ? threads : enough);
}
