/* Arithmetic on a few numbers, on the calling thread: lengths, positions, counts and the like of a step's requests.
 *
 * Integers are computed in 64 bits. Floats are computed in double, except rows of float in `vectors`; if the output
 * is float, the result is rounded. For sums, differences and products this gives the same result as a computation in
 * float.
 */
#include "../c/vector.h"

enum { I64, I32, BOOLEAN, F32, F64 };
enum { ADD, SUBTRACT, MULTIPLY, EQUAL, UNEQUAL, LESS, GREATER, AT_MOST, AT_LEAST, DIVIDE, REMAINDER, LEAST, GREATEST, OR, AND,
       COPY, CHOOSE, SUM, PRODUCTS };

/* out [rows, columns] from a and b. Strides are in bytes, and 0 in broadcast dimensions. */
struct aerie_numbers {
    const char *a, *b;
    char *out;
    int64_t rows, columns;
    int64_t a_kind, a_row, a_column, b_kind, b_row, b_column, out_kind, out_row, out_column;
    int64_t operation, floats;
};

INLINE int64_t whole_at(const char *from, int64_t kind)
{
    return kind == I64 ? *(const int64_t *)from : kind == I32 ? *(const int32_t *)from : *(const uint8_t *)from;
}

INLINE void put_whole(char *to, int64_t kind, int64_t x)
{
    if (kind == I64)
        *(int64_t *)to = x;
    else if (kind == I32)
        *(int32_t *)to = (int32_t)x;
    else
        *(uint8_t *)to = x != 0;
}

INLINE double float_at(const char *from, int64_t kind)
{
    return kind == F64 ? *(const double *)from : kind == F32 ? *(const float *)from : (double)whole_at(from, kind);
}

/* Returns a / b rounded down, so that the remainder has the sign of b, as in Python. Division by zero gives 0. */
INLINE int64_t quotient(int64_t a, int64_t b)
{
    return b ? a / b - (a % b != 0 && (a % b < 0) != (b < 0)) : 0;
}

INLINE int64_t of_wholes(int64_t operation, int64_t a, int64_t b)
{
    switch (operation) {
    case ADD: return (int64_t)((uint64_t)a + (uint64_t)b);
    case SUBTRACT: return (int64_t)((uint64_t)a - (uint64_t)b);
    case MULTIPLY: return (int64_t)((uint64_t)a * (uint64_t)b);
    case EQUAL: return a == b;
    case UNEQUAL: return a != b;
    case LESS: return a < b;
    case GREATER: return a > b;
    case AT_MOST: return a <= b;
    case AT_LEAST: return a >= b;
    case DIVIDE: return quotient(a, b);
    case REMAINDER: return a - quotient(a, b) * b;
    case LEAST: return a < b ? a : b;
    case GREATEST: return a > b ? a : b;
    case OR: return a | b;
    case AND: return a & b;
    default: return a;
    }
}

INLINE int compare(int64_t operation, double a, double b)
{
    switch (operation) {
    case EQUAL: return a == b;
    case UNEQUAL: return a != b;
    case LESS: return a < b;
    case GREATER: return a > b;
    case AT_MOST: return a <= b;
    default: return a >= b;
    }
}

INLINE void of_floats(const struct aerie_numbers *n, const char *one, const char *other, char *to)
{
    double a = float_at(one, n->a_kind), b = float_at(other, n->b_kind), x = a;
    switch (n->operation) {
    case EQUAL: case UNEQUAL: case LESS: case GREATER: case AT_MOST: case AT_LEAST:
        put_whole(to, n->out_kind, compare(n->operation, a, b));
        return;
    case ADD: x = a + b; break;
    case SUBTRACT: x = a - b; break;
    case MULTIPLY: x = a * b; break;
    }
    if (n->out_kind == F64)
        *(double *)to = x;
    else if (n->a_kind < F32) /* a copy of an integer, which is rounded once */
        *(float *)to = (float)whole_at(one, n->a_kind);
    else
        *(float *)to = (float)x;
}

/* Sums, differences and products of rows of float, in vectors. */
INLINE void vectors(const struct aerie_numbers *n, const float *a, const float *b, float *out)
{
    if (n->operation == ADD)
        for (int64_t c = 0; c < n->columns; c++) out[c] = a[c] + b[c];
    else if (n->operation == SUBTRACT)
        for (int64_t c = 0; c < n->columns; c++) out[c] = a[c] - b[c];
    else
        for (int64_t c = 0; c < n->columns; c++) out[c] = a[c] * b[c];
}

void NAMED(aerie_numbers)(const struct aerie_numbers *n)
{
    int is_vector = n->operation <= MULTIPLY && n->a_kind == F32 && n->b_kind == F32 && n->out_kind == F32
                    && n->a_column == 4 && n->b_column == 4 && n->out_column == 4;
    for (int64_t r = 0; r < n->rows; r++) {
        const char *a = n->a + r * n->a_row, *b = n->b + r * n->b_row;
        char *out = n->out + r * n->out_row;
        int64_t sum = 0, product = 1;
        if (is_vector) {
            vectors(n, (const float *)a, (const float *)b, (float *)out);
            continue;
        }
        for (int64_t c = 0; c < n->columns; c++) {
            const char *one = a + c * n->a_column, *other = b + c * n->b_column;
            char *to = out + c * n->out_column;
            if (n->floats) {
                of_floats(n, one, other, to);
                continue;
            }
            int64_t x = whole_at(one, n->a_kind);
            if (n->operation == SUM)
                put_whole(out, n->out_kind, sum += x);
            else if (n->operation == CHOOSE) { /* the output keeps its number where a is 0 */
                if (x) put_whole(to, n->out_kind, whole_at(other, n->b_kind));
            } else if (n->operation == PRODUCTS)
                put_whole(to, n->out_kind, product *= x);
            else
                put_whole(to, n->out_kind, of_wholes(n->operation, x, whole_at(other, n->b_kind)));
        }
    }
}
