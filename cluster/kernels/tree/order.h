/* Candidates in order of their scores. Of equal scores, the lower number comes first. Include `vector.h` before. */
#pragma once

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
