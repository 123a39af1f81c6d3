/* The error count of joined calls, whose kernels have no other way to report an error. */
#pragma once
#include <stdint.h>

extern _Thread_local int64_t aerie_missing; /* accesses to missing rows of tables since `aerie_calls` last returned */
