/* Memory that a thread keeps from call to call. */
#pragma once
#include <stddef.h>
void *aerie_scratch(int slot, size_t bytes);
