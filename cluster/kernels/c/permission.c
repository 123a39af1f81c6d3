/* Linux keeps room for the registers of AMX, 8 KiB a thread, only in processes that have asked for it. */
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

enum { REQUEST = 0x1023 /* ARCH_REQ_XCOMP_PERM */, TILES_DATA = 18 };

/* Whether this process may use them from now on: not where the system does not know them, or forbids it. */
int aerie_ask_for_tiles(void) { return syscall(SYS_arch_prctl, REQUEST, TILES_DATA) == 0; }
#else
int aerie_ask_for_tiles(void) { return 0; }
#endif
