/* Permission for AMX: Linux reserves space for its registers, 8 KiB a thread, only in processes that ask for it. */
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

enum { REQUEST = 0x1023 /* ARCH_REQ_XCOMP_PERM */, TILES_DATA = 18 };

/* Asks for AMX. Returns whether this process may use it; 0 if the system does not know AMX or forbids it. */
int aerie_ask_for_tiles(void) { return syscall(SYS_arch_prctl, REQUEST, TILES_DATA) == 0; }
#else
int aerie_ask_for_tiles(void) { return 0; }
#endif
