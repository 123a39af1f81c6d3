/* A job in parts on the threads that torch computes with: its OpenMP runtime, so that no second set of threads spins. */
#pragma once
#include <stdint.h>

typedef void (*part_of)(const void *job, int64_t part, int64_t parts);
void aerie_spread(part_of run, const void *job, int64_t parts);
