"""`aerie bench`: speed without Ray (offline), as served (serving), how well the draft predicts (acceptance), or any
draft at three levels (levels), what it costs ranks to step together (lockstep), what clients see when processes die
(faults), when others are rude (rude), and when there are too many of them (overload).
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.bench import acceptance, faults, levels, lockstep, offline, overload, rude, serving
from cluster.bench.pair import Pair
from cluster.bench.report import json_line, write_json

PARTS = ("offline", "serving", "acceptance", "levels", "lockstep", "faults", "rude", "overload")
DEFAULT_PARTS = ("offline", "serving")
DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie bench`."""
    pair = Pair()
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: {' '.join(DEFAULT_PARTS)})"
    )
    parser.add_argument(
        "--model", default=pair.target, metavar="DIR", help="folder of the target (default: the demo's)"
    )
    parser.add_argument("--draft", default=pair.draft, metavar="DIR", help="folder of its draft")
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
    pair = Pair(args.model, args.draft, args.dtype, args.num_threads)
    say: Callable[[str], None] = _progress
    if part == "offline":
        size = offline.QUICK if args.quick else offline.Size()
        size = replace(size, repeats=args.repeats or size.repeats)
        result = offline.measure(pair, size, say=say)
        return result, offline.show(result)
    if part == "acceptance":
        result = acceptance.measure(pair, acceptance.QUICK if args.quick else acceptance.Size(), say)
        return result, acceptance.show(result)
    if part == "levels":
        result = levels.measure(pair, acceptance.QUICK if args.quick else acceptance.Size(), say)
        return result, levels.show(result)
    if part == "lockstep":
        sized = lockstep.QUICK if args.quick else lockstep.Size()
        result = lockstep.measure(pair, replace(sized, repeats=args.repeats or sized.repeats), say)
        return result, lockstep.show(result)
    if part == "faults":
        result = faults.measure(faults.QUICK if args.quick else faults.Size(), say)
        return result, faults.show(result)
    if part == "rude":
        result = rude.measure(rude.QUICK if args.quick else rude.Size(), say)
        return result, rude.show(result)
    if part == "overload":
        result = overload.measure(overload.QUICK if args.quick else overload.Size(), say)
        return result, overload.show(result)
    result = serving.measure(pair, serving.QUICK if args.quick else serving.Size(), say)
    return result, serving.show(result)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
