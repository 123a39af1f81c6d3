/* Kernels one after the other, by one call: where each takes microseconds, a call from Python takes as long as the kernel.
 *
 * Every kernel takes whole numbers and pointers, of 64 bits, and at most two doubles. On x86-64 (System V) and AArch64 both
 * sorts have registers of their own, and the caller removes what lies on the stack. So a kernel finds its arguments where it
 * looks for them, whatever its order of the two sorts is, and does not see the arguments that it does not take.
 */
#include "calls.h"

#define WHOLES 16 /* of which six or eight are in registers, the others on the stack in their order */

struct aerie_call {
    void (*run)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                int64_t, int64_t, int64_t, int64_t, double, double);
    int64_t wholes[WHOLES];
    double floats[2];
};

_Thread_local int64_t aerie_missing;

/* Returns how many rows the calls asked for that there are not. */
int64_t aerie_calls(const struct aerie_call *calls, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const int64_t *w = calls[i].wholes;
        calls[i].run(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15],
                     calls[i].floats[0], calls[i].floats[1]);
    }
    int64_t missing = aerie_missing;
    aerie_missing = 0;
    return missing;
}
