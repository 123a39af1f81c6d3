/* Moves of KV cells between slots, in all layers. They run on the calling thread, because few cells change slots. */
#include "../c/vector.h"
#include "../c/scratch.h"

/* The slot of `memory` that belongs to `slot`. `pages` maps pages of `page` slots to those of `memory`; NULL: all pages
 * to themselves.
 */
INLINE int64_t own_slot(const int32_t *pages, int64_t page, int64_t slot)
{
    return pages ? (int64_t)pages[slot / page] * page + slot % page : slot;
}

/* In each of the layers of `memory`, which are `layer` bytes apart and have a cell of `size` bytes per slot, slot
 * destination[i] becomes a copy of slot source[i]. All sources are read before any slot is written. For `pages` and
 * `page` see `own_slot`.
 */
void NAMED(aerie_move)(char *memory, const int64_t *destination, const int64_t *source, int64_t count, int64_t layers,
                       int64_t layer, int64_t size, const int32_t *pages, int64_t page)
{
    int64_t *moved = aerie_scratch(0, sizeof *moved * (count + 1)), moves = 0;
    for (int64_t i = 0; i < count; i++)
        if (destination[i] != source[i]) moved[moves++] = i;
    char *cells = aerie_scratch(1, moves * size + 1);
    for (int64_t l = 0; l < layers; l++, memory += layer) {
        for (int64_t m = 0; m < moves; m++) memcpy(cells + m * size, memory + own_slot(pages, page, source[moved[m]]) * size, size);
        for (int64_t m = 0; m < moves; m++)
            memcpy(memory + own_slot(pages, page, destination[moved[m]]) * size, cells + m * size, size);
    }
}
