/* Copies of rows. They run on the calling thread, because a step copies only few and short rows. Sizes and strides are
 * in bytes.
 *
 * Ids [count] have 64 bits if `wide`, else 32. Rows that a table does not have are skipped and counted, for
 * `aerie_calls`.
 */
#include "../c/calls.h"
#include "../c/vector.h"

INLINE int64_t id_at(const void *ids, int64_t i, int64_t wide)
{
    return wide ? ((const int64_t *)ids)[i] : ((const int32_t *)ids)[i];
}

INLINE int is_missing(int64_t id, int64_t rows)
{
    int missing = id < 0 || id >= rows;
    aerie_missing += missing;
    return missing;
}

/* table [rows, size] -> out [count, size]: row i is row ids[i] of the table. With `wraps`, negative ids count from the
 * end.
 */
void NAMED(aerie_gather)(const char *table, const void *ids, char *out, int64_t count, int64_t size, int64_t rows,
                         int64_t wide, int64_t wraps)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t id = id_at(ids, i, wide);
        if (wraps && id < 0) id += rows;
        if (!is_missing(id, rows)) memcpy(out + i * size, table + id * size, (size_t)size);
    }
}

/* given [count, size] -> table [rows, size]: row i becomes row ids[i] of the table. */
void NAMED(aerie_scatter)(char *table, const void *ids, const char *given, int64_t count, int64_t size, int64_t rows,
                          int64_t wide)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t id = id_at(ids, i, wide);
        if (!is_missing(id, rows)) memcpy(table + id * size, given + i * size, (size_t)size);
    }
}

/* given [count, size], rows at `given_stride` -> out [count, size], rows at `out_stride`. */
void NAMED(aerie_place)(const char *given, char *out, int64_t count, int64_t size, int64_t given_stride, int64_t out_stride)
{
    for (int64_t i = 0; i < count; i++) memcpy(out + i * out_stride, given + i * given_stride, (size_t)size);
}

/* table at strides -> out [rows, columns], numbers of `size` bytes: out[r][c] = table[row id][column id]. The 64-bit
 * ids lie at strides, which are 0 for broadcast ids. If row_ids is NULL, the row id is r. With `wraps`, negative ids
 * count from the end.
 */
struct aerie_cells {
    const char *table;
    const int64_t *row_ids, *column_ids;
    char *out;
    int64_t rows, columns, size, table_rows, table_columns, row_stride, column_stride;
    int64_t row_ids_row, row_ids_column, column_ids_row, column_ids_column, wraps;
};

void NAMED(aerie_cells)(const struct aerie_cells *k)
{
    for (int64_t i = 0; i < k->rows * k->columns; i++) {
        int64_t r = i / k->columns, c = i % k->columns;
        int64_t row = k->row_ids ? k->row_ids[r * k->row_ids_row + c * k->row_ids_column] : r;
        int64_t column = k->column_ids[r * k->column_ids_row + c * k->column_ids_column];
        if (k->wraps && row < 0) row += k->table_rows;
        if (k->wraps && column < 0) column += k->table_columns;
        if (!(is_missing(row, k->table_rows) + is_missing(column, k->table_columns)))
            memcpy(k->out + i * k->size, k->table + row * k->row_stride + column * k->column_stride, (size_t)k->size);
    }
}
