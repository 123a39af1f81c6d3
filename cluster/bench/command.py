"""`aerie bench`: a table of measurements, each a module with `Size`, `QUICK`, `measure` and `show`."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from cluster.bench import acceptance, crowd, faults, levels, lockstep, offline, overload, radix, rude, serving, strain
from cluster.bench.pair import Pair, named
from cluster.bench.report import json_line, write_json
from cluster.checkout import DEMO_TARGET, demo_path

OF_A_PAIR: dict[str, ModuleType] = {
    "offline": offline,  # speed without Ray
    "serving": serving,  # as served
    "acceptance": acceptance,  # how well the draft predicts
    "levels": levels,  # any draft, three levels, depth by depth
    "lockstep": lockstep,  # what it costs ranks to step together
}
OF_A_TARGET: dict[str, ModuleType] = {
    "strain": strain,  # steps of seconds, a busy machine, a rank that is stopped
}
WITH_THEIR_OWN: dict[str, ModuleType] = {
    "faults": faults,  # what clients see when processes die
    "crowd": crowd,  # the same with a queue behind them
    "rude": rude,  # when others are rude
    "overload": overload,  # when there are too many of them
    "radix": radix,  # what the radix tree costs
}
PARTS = OF_A_PAIR | OF_A_TARGET | WITH_THEIR_OWN
DEFAULT_PARTS = ("offline", "serving")
DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie bench`."""
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: {' '.join(DEFAULT_PARTS)})"
    )
    parser.add_argument("--model", metavar="DIR", help="folder of the target (default: the demo's)")
    parser.add_argument("--draft", metavar="DIR", help="folder of its draft")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float64", "float32", "bfloat16"])
    parser.add_argument("--num-threads", type=int, metavar="N", help="torch threads (default: all cores)")
    parser.add_argument("--repeats", type=int, metavar="N", help="how often contenders take turns (default: 5)")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; shows the form, not the speed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per part instead of tables")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write DIR/PART.json and DIR/PART.txt")


def run(args: argparse.Namespace) -> int:
    """Measure and print. 1 when outputs that must be equal were not or a stream failed, else 0.

    Raises:
        ValueError: a part that does not exist, or a model that cannot be measured.
    """
    parts = args.parts or list(DEFAULT_PARTS)
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"part {part!r} is none of {', '.join(PARTS)}")
    same = True
    for part in parts:
        result, text = _measure(part, args)
        same = same and bool(result.get("identical", True)) and not result.get("failed", 0)
        print(json_line(result) if args.json else f"{text}\n", flush=True)
        if args.out is not None:
            write_json(result, args.out / f"{part}.json")
            (args.out / f"{part}.txt").write_text(text + "\n", encoding="utf-8")
    return 0 if same else DIFFERENT


def _measure(part: str, args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """One part's figures, and the same as text."""
    module = PARTS[part]
    size = module.QUICK if args.quick else module.Size()
    if args.repeats and hasattr(size, "repeats"):
        size = replace(size, repeats=args.repeats)
    say: Callable[[str], None] = _progress
    if part in OF_A_TARGET:
        target = args.model or demo_path(DEMO_TARGET, "give --model DIR")
        result = module.measure(target, args.dtype, size, say=say)
    elif part in OF_A_PAIR:
        result = module.measure(Pair(*named(args.model, args.draft), args.dtype, args.num_threads), size, say=say)
    else:
        result = module.measure(size, say=say)
    return result, module.show(result)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
