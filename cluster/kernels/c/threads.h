/* Runs the parts of a job on torch's threads, by torch's OpenMP runtime: a second pool of spinning threads would
 * compete.
 */
#pragma once
#include <stdint.h>

typedef void (*part_of)(const void *job, int64_t part, int64_t parts);
void aerie_spread(part_of run, const void *job, int64_t parts);
