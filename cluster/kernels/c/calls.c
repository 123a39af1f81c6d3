/* Runs several kernels in one call. A call from Python takes about a microsecond, which is much for a kernel that takes
 * only a few microseconds.
 *
 * Every kernel takes 64-bit integers and pointers, and at most two doubles. On x86-64 (System V) and AArch64, integers
 * and doubles are passed in separate registers, and the caller removes its arguments from the stack. So all kernels can
 * be called with one signature: each kernel finds its integers and its doubles, and ignores surplus arguments.
 */
#include "calls.h"

#define MAX_INTEGERS 16 /* integers; the first six (x86-64) or eight (AArch64) are in registers, the others on the stack */

struct aerie_call {
    void (*run)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                int64_t, int64_t, int64_t, int64_t, double, double);
    int64_t integers[MAX_INTEGERS];
    double doubles[2];
};

_Thread_local int64_t aerie_missing;

/* Runs the calls; returns how many row indices were outside their tables. */
int64_t aerie_calls(const struct aerie_call *calls, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const int64_t *w = calls[i].integers;
        calls[i].run(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15],
                     calls[i].doubles[0], calls[i].doubles[1]);
    }
    int64_t missing = aerie_missing;
    aerie_missing = 0;
    return missing;
}
