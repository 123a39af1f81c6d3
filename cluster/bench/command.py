"""`aerie bench`: run measurements ("parts") by name. A part is a module of `cases/` with `Size`, `QUICK`, `measure` and
`show`. A part with goals also has `goals`, which maps the result of `measure` to a list of `Goal`. In a checkout,
`python -m benchmarks` is the same command with more parts.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from cluster.bench.cases import (
    acceptance,
    adaptive,
    cache,
    crowd,
    faults,
    grammars,
    levels,
    lockstep,
    offline,
    overload,
    packed,
    peers,
    roofline,
    rude,
    serving,
)
from cluster.bench.goals import Goal, goal_summary
from cluster.bench.pair import ModelPair, resolve_folders
from cluster.bench.random_models import PRESETS
from cluster.bench.report import json_line, write_json


class Part(NamedTuple):
    """A measurement: its module, and its longest duration on two free cores, which is `minutes` for a full run and
    `quick_s` seconds with --quick. A `standalone` part serves the demo's target and draft, or needs no model. Any other
    part measures the target and draft that the arguments name.
    """

    module: ModuleType
    minutes: float
    quick_s: float
    standalone: bool = False


PARTS = {
    "offline": Part(offline, 5, 60),  # speed of an engine without Ray
    "serving": Part(serving, 3, 60),  # start-up, latency and memory of `aerie serve`
    "acceptance": Part(acceptance, 3, 60),  # how well the draft predicts
    "adaptive": Part(adaptive, 30, 60),  # trees chosen by load, against every fixed tree
    "levels": Part(levels, 3, 60),  # acceptance by depth of any draft, three levels deep
    "grammars": Part(grammars, 25, 150),  # the cost of a grammar, and the gain of tree nodes that the grammar forces
    "peers": Part(peers, 30, 300),  # against vLLM's CPU build
    "lockstep": Part(lockstep, 15, 90),  # what it costs that data-parallel ranks run every step together
    "roofline": Part(roofline, 15, 60),  # the time of each phase of a step against the least possible time
    "faults": Part(faults, 15, 180, standalone=True),  # what clients see when processes die
    "crowd": Part(crowd, 5, 90, standalone=True),  # what clients see when processes die while many requests queue
    "rude": Part(rude, 15, 180, standalone=True),  # whether abusive clients disturb streams
    "overload": Part(
        overload, 5, 120, standalone=True
    ),  # answers and refusals when clients send five times the capacity
    "cache": Part(cache, 5, 30, standalone=True),  # attention over a KV cache in FP8, against one in the model's dtype
    "packed": Part(packed, 5, 30, standalone=True),  # matrix products with weights that stay quantised
}
DEFAULT_PARTS = ("offline", "serving")
DRAFT_OPTIONAL = ("peers", "roofline")  # these parts can measure plain decoding alone
# Each of these options applies only to the parts whose `Size` has a field of that name.
PART_OPTIONS = ("contexts", "shape", "layers", "accept_length", "families", "kinds", "temperatures", "ranks")
EXIT_FAILED = 1  # exit status: a goal was missed, something failed, or outputs that must be equal differ


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `aerie bench`."""
    durations = ", ".join(f"{part} ({info.minutes:g} min, quick {info.quick_s:g} s)" for part, info in PARTS.items())
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"any of the following, with the longest that each takes on two free cores: {durations} "
        f"(default: {' '.join(DEFAULT_PARTS)})",
    )
    parser.add_argument("--model", metavar="DIR", help="folder of the target (default: the demo's)")
    parser.add_argument(
        "--draft",
        metavar="DIR",
        help="folder of its draft (default: the demo's; with --model only peers and roofline do without)",
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float64", "float32", "bfloat16"])
    parser.add_argument("--num-threads", type=int, metavar="N", help="torch threads (default: all cores)")
    parser.add_argument(
        "--batches", type=int, nargs="+", metavar="N", help="requests at once (default: the part's own)"
    )
    parser.add_argument("--contexts", type=int, nargs="+", metavar="N", help="tokens before the steps of roofline")
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help=f"for roofline and peers, in place of folders: random weights of {', '.join(PRESETS)}",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers of --shape (default: all that fit)")
    parser.add_argument(
        "--accept-length", type=float, metavar="A", help="tokens that a step of roofline accepts (default: the draft's)"
    )
    parser.add_argument("--families", nargs="+", choices=adaptive.FAMILIES, help="trees of adaptive (default: all)")
    parser.add_argument("--kinds", nargs="+", choices=adaptive.KINDS, help="texts of adaptive (default: all)")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", metavar="T", help="temperatures of adaptive (default: 0 0.8 1)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="ranks of adaptive (default: 1 2)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repeats of each contender (default: the part's own)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure little: shows that the part works, not its speed; goals have looser bounds, which are printed",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per part instead of tables")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write DIR/PART.json and DIR/PART.txt")


def run(args: argparse.Namespace) -> int:
    """Measure the parts and print their tables, with a line for each missed goal.

    Return 1 if a goal was missed, outputs that must be equal differ, or a part counted failures; otherwise 0.

    Raises:
        ValueError: a part or an option is wrong, or a model cannot be measured.
    """
    parts = args.parts or list(DEFAULT_PARTS)
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}; the parts are {', '.join(PARTS)}")
    if args.shape and (args.model or args.draft):
        raise ValueError("--shape makes its own model and draft; leave out --model and --draft")
    for name in PART_OPTIONS:
        parts_with_option = [part for part, info in PARTS.items() if hasattr(info.module.QUICK, name)]
        if getattr(args, name) and not set(parts_with_option) & set(parts):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is an option of {' and '.join(parts_with_option)}, which the parts leave out")
    passed = True
    for part in parts:
        result, text = _measure(part, args)
        passed = passed and bool(result.get("identical", True)) and not result.get("failed", 0)
        passed = passed and all(goal["met"] for goal in result["goals"])
        print(json_line(result) if args.json else f"{text}\n", flush=True)
        if args.out is not None:
            write_json(result, args.out / f"{part}.json")
            (args.out / f"{part}.txt").write_text(text + "\n", encoding="utf-8")
    return 0 if passed else EXIT_FAILED


def _measure(part: str, args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Measure one part. Return its figures and goals, once as data for JSON and once as text."""
    module = PARTS[part].module
    size = module.QUICK if args.quick else module.Size()
    options = {name: getattr(args, name) for name in ("repeats", "batches", *PART_OPTIONS)}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    size = replace(size, **{name: value for name, value in options.items() if value and hasattr(size, name)})
    if not PARTS[part].standalone:
        pair = ModelPair(*resolve_folders(args.model, args.draft, part in DRAFT_OPTIONAL), args.dtype, args.num_threads)
        result = module.measure(pair, size, log_progress=_print_progress)
    else:
        result = module.measure(size, log_progress=_print_progress)
    # A part that measures a target and a draft has goals only for those of the demo.
    has_goals = PARTS[part].standalone or not (args.model or args.draft or args.shape)
    goals: list[Goal] = module.goals(result) if has_goals and hasattr(module, "goals") else []
    lines = [module.show(result)]
    lines += [] if result.get("identical", True) else ["DIFFERENT: outputs that must be equal are not"]
    lines += [f"FAILED: {result['failed']}"] if result.get("failed", 0) else []
    lines += [goal_summary(goals, args.quick)] if goals else []
    return result | {"goals": [goal.as_json(args.quick) for goal in goals]}, "\n".join(lines)


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
