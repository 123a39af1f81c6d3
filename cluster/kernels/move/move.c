/* Moves of KV cells between slots, in all layers. They run on the calling thread, because few cells change slots. */
#include "../c/vector.h"
#include "../c/scratch.h"

/* In each of the layers of `memory`, which are `layer` bytes apart and have a cell of `size` bytes per slot, slot
 * destination[i] becomes a copy of slot source[i]. All sources are read before any slot is written.
 */
void NAMED(aerie_move)(char *memory, const int64_t *destination, const int64_t *source, int64_t count, int64_t layers,
                       int64_t layer, int64_t size)
{
    int64_t *moved = aerie_scratch(0, sizeof *moved * (count + 1)), moves = 0;
    for (int64_t i = 0; i < count; i++)
        if (destination[i] != source[i]) moved[moves++] = i;
    char *cells = aerie_scratch(1, moves * size + 1);
    for (int64_t l = 0; l < layers; l++, memory += layer) {
        for (int64_t m = 0; m < moves; m++) memcpy(cells + m * size, memory + source[moved[m]] * size, size);
        for (int64_t m = 0; m < moves; m++) memcpy(memory + destination[moved[m]] * size, cells + m * size, size);
    }
}
