"""GIL switch interval and garbage collection of processes that serve streams."""

import gc
import sys

SWITCH_INTERVAL_S = 5e-5
"""How long a thread waits for the GIL before the thread that holds it must release it. A step releases the GIL some 200
times; an event loop releases it with every chunk that it sends. Each time, a thread that computes in Python can delay
the step or the event loop by this long.
"""


def tune_gil_and_gc() -> None:
    """Set the switch interval, and exclude all present objects from garbage collection. Call this when all is loaded: a
    full collection of the loaded objects takes a fifth of a second.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
