"""How the interpreter of a process that serves streams treats them."""

import gc
import sys

SWITCH_INTERVAL_S = 5e-5
"""How long a thread waits until another one has to release the interpreter's lock. A step lets go of it some 200 times,
an event loop with every chunk that it sends; beside a thread that computes in Python each time costs so much.
"""


def settle() -> None:
    """Call this when all is loaded: threads take turns quickly from now on, and what lives as long as the process is
    not looked through again by the collector of garbage, which takes a fifth of a second.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
