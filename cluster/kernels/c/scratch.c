#include "scratch.h"
#include <stdlib.h>

static _Thread_local struct { void *at; size_t bytes; } kept[4];

/* At least `bytes`, aligned to 64; what an earlier call for the same slot gave is no longer valid. */
void *aerie_scratch(int slot, size_t bytes)
{
    if (kept[slot].bytes < bytes) {
        free(kept[slot].at);
        kept[slot].bytes = (bytes + 65535) & ~(size_t)65535;
        kept[slot].at = aligned_alloc(64, kept[slot].bytes);
        if (!kept[slot].at) abort();
    }
    return kept[slot].at;
}
