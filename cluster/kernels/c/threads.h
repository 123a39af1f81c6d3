/* Runs the parts of a job on torch's threads, by torch's OpenMP runtime. A second pool of threads, which spin while
 * they wait, would compete with torch's threads for the cores.
 */
#pragma once
#include <stdint.h>

typedef void (*part_of)(const void *job, int64_t part, int64_t parts);
void aerie_spread(part_of run, const void *job, int64_t parts);
