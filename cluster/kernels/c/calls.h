/* What calls that nobody looks after leave behind. */
#pragma once
#include <stdint.h>

extern _Thread_local int64_t aerie_missing; /* rows that were asked for and that there are not, since `aerie_calls` told */
