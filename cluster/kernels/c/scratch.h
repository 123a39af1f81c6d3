/* Memory that a thread keeps from call to call, until it ends. */
#pragma once
#include <stddef.h>
void *aerie_scratch(int slot, size_t bytes);
