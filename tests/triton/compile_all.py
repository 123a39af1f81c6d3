"""Compiles the Triton programs of every configuration for sm_90 and sm_100 without a GPU, and prints the resources that
each program needs.

Attention must copy the next tile while it works on the current one. Whether Triton compiles it so depends on Triton's
version.

`TRITON_INTERPRET=0 python -m tests.triton.compile_all [NAME ..]`; the exit status is 1 if a program needs too much or
attention waits for each tile.
"""

import sys

import torch

from tests.triton.compiling import SHARED_MEMORY, compile_program
from tests.triton.configurations import OTHER_PROGRAMS, SHAPES, layer_programs


def main(names: list[str]) -> int:
    """Compile the programs of the configurations `names`, or of all; return the exit status."""
    compiled_keys: dict[object, bool] = {}
    failures = 0
    print(f"{'shape':24} {'program':24} {'sm':>4} {'shared':>8} {'registers':>9} {'spilled':>8}")
    for name in names or [*SHAPES, *OTHER_PROGRAMS]:
        for program_name, started_program in (
            OTHER_PROGRAMS[name]() if name in OTHER_PROGRAMS else layer_programs(SHAPES[name], torch.bfloat16)
        ):
            kinds = tuple(str(getattr(value, "dtype", type(value))) for value in started_program.arguments)
            key = started_program.program.__name__, kinds, tuple(started_program.constants.items())
            if key in compiled_keys:
                continue
            compiled_keys[key] = True
            for capability in (90, 100):
                compiled_program = compile_program(started_program, capability)
                fits = compiled_program.shared <= SHARED_MEMORY and not compiled_program.spilled_bytes
                waits_for_tiles = (
                    compiled_program.name == "attend"
                    and not started_program.constants["KEY_SCALES"]
                    and not compiled_program.async_copies
                )
                failures += not fits or waits_for_tiles
                columns = (
                    f"{compiled_program.shared:8} {compiled_program.registers:9} {compiled_program.spilled_bytes:8}"
                )
                verdict = "" if fits else "  TOO MUCH"
                verdict += "  WAITS FOR EACH TILE" if waits_for_tiles else ""
                print(f"{name:24} {program_name:24} {capability:4} {columns}{verdict}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
