#include "scratch.h"
#include <pthread.h>
#include <stdlib.h>

enum { SLOTS = 4 };
struct slot {
    void *at;
    size_t bytes;
};
static _Thread_local struct slot kept[SLOTS];
static pthread_key_t end_of_thread;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void give_back(void *held)
{
    struct slot *slots = held;
    for (int i = 0; i < SLOTS; i++) {
        free(slots[i].at);
        slots[i] = (struct slot){0};
    }
}

static void make_key(void)
{
    if (pthread_key_create(&end_of_thread, give_back)) abort();
}

/* Returns memory of this thread, of at least `bytes` bytes, aligned to 64 bytes. The memory that an earlier call with
 * the same `slot` returned must not be used any more.
 */
void *aerie_scratch(int slot, size_t bytes)
{
    if (kept[slot].bytes < bytes) {
        pthread_once(&once, make_key);
        if (pthread_setspecific(end_of_thread, kept)) abort();
        free(kept[slot].at);
        kept[slot].bytes = (bytes + 65535) & ~(size_t)65535;
        kept[slot].at = aligned_alloc(64, kept[slot].bytes);
        if (!kept[slot].at) abort();
    }
    return kept[slot].at;
}
