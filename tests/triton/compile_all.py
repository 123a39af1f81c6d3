"""Compiles every configuration for sm_90 and sm_100 without a GPU, and prints what each takes.

Attention has to copy a tile while it works on the one before: whether Triton finds a way to is a matter of its version.

`TRITON_INTERPRET=0 python -m tests.triton.compile_all [NAME ..]`; ends with 1 where one has too much.
"""

import sys

import torch

from tests.triton.compiling import SHARED_MEMORY, compiled
from tests.triton.configurations import OTHERS, SHAPES, started


def main(names: list[str]) -> int:
    """Compile those of the shapes `names`, and of others, or of all."""
    known: dict[object, bool] = {}
    bad = 0
    print(f"{'shape':24} {'program':24} {'sm':>4} {'shared':>8} {'registers':>9} {'spilled':>8}")
    for name in names or [*SHAPES, *OTHERS]:
        for what, one in OTHERS[name]() if name in OTHERS else started(SHAPES[name], torch.bfloat16):
            kinds = tuple(str(getattr(value, "dtype", type(value))) for value in one.given)
            key = one.program.__name__, kinds, tuple(one.constants.items())
            if key in known:
                continue
            known[key] = True
            for capability in (90, 100):
                made = compiled(one, capability)
                fits = made.shared <= SHARED_MEMORY and not made.spilled
                waits = made.name == "attend" and not one.constants["FP8_GROUPS"] and not made.copies
                bad += not fits or waits
                numbers = f"{made.shared:8} {made.registers:9} {made.spilled:8}"
                wrong = "" if fits else "  TOO MUCH"
                wrong += "  WAITS FOR EACH TILE" if waits else ""
                print(f"{name:24} {what:24} {capability:4} {numbers}{wrong}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
