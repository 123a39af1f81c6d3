#include "threads.h"

typedef void (*fork_of)(void (*run)(void *), void *data, unsigned threads, unsigned flags);
static fork_of fork_threads; /* GOMP_parallel */
static int (*own_number)(void); /* omp_get_thread_num */
static int (*how_many)(void); /* omp_get_num_threads; may be fewer than requested */

void aerie_runtime(void *parallel, void *number, void *count)
{
    fork_threads = (fork_of)parallel;
    own_number = (int (*)(void))number;
    how_many = (int (*)(void))count;
}

struct spread {
    part_of run;
    const void *job;
    int64_t parts;
};

static void one(void *data)
{
    const struct spread *all = data;
    int64_t step = how_many();
    for (int64_t part = own_number(); part < all->parts; part += step) all->run(all->job, part, all->parts);
}

void aerie_spread(part_of run, const void *job, int64_t parts)
{
    struct spread all = {run, job, parts};
    if (parts > 1 && fork_threads)
        fork_threads(one, &all, 0, 0); /* 0: all threads; to run fewer, GNU's runtime would end some of its threads */
    else
        for (int64_t part = 0; part < parts; part++) run(job, part, parts);
}
