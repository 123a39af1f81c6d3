/* Scratch memory, which a thread keeps from call to call and frees when it ends. */
#pragma once
#include <stddef.h>
void *aerie_scratch(int slot, size_t bytes);
