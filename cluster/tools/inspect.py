"""`aerie inspect`: what a checkpoint is and how it would be served, from its headers alone; no weight is read.

A target alone is told without torch, whose import takes longer than all the rest. A draft, ranks, single tensors,
quantised weights and everything that is wrong are told by the code that loads them, on torch's meta device.
"""

import argparse
import importlib
import json
from dataclasses import asdict
from pathlib import Path

from cluster.arch.summary import BYTES, Report, summary
from cluster.config import ConfigError
from cluster.tools.overrides import add_override_argument, overrides_of

UNSHOWN = ("tensors", "spec", "choices", "folder")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie inspect`."""
    parser.add_argument("path", metavar="DIR", help="folder of the target")
    parser.add_argument("--draft", metavar="DIR", help="folder of the draft")
    parser.add_argument("--tp", type=int, default=1, help="ranks")
    parser.add_argument("--dp", type=int, default=1, help="attention groups")
    parser.add_argument("--dtype", default="auto", choices=["auto", *BYTES])
    add_override_argument(parser)
    parser.add_argument("--token-map", metavar="FILE", help="token ids that the draft ranks; .json or .safetensors")
    parser.add_argument("--tensors", action="store_true", help="list every tensor: its file, and what asked for it")
    parser.add_argument("--json", action="store_true", help="print one JSON object, tensors included")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 when it would not serve.

    Raises:
        ConfigError: flags that do not go together.
    """
    overrides = overrides_of(args.draft_override)
    if args.draft is None and (overrides or args.token_map):
        raise ConfigError("--draft-override and --token-map are about a draft; give --draft DIR as well")
    report = None
    if args.draft is None and args.tp == 1 and args.dp == 1 and not args.tensors and not args.json:
        report = summary(args.path, args.dtype)
    if report is None:
        inspect = importlib.import_module("cluster.tools.tensor_report").inspect
        report = inspect(args.path, args.draft, args.tp, args.dp, args.dtype, (overrides, args.token_map))
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        _print(report, args.tensors)
    return 1 if report.problems else 0


def _print(report: Report, tensors: bool) -> None:
    for title, found in (("target", report.target), ("draft", report.draft or {})):
        if not found:
            continue
        facts = [f"{key} {_shown(value)}" for key, value in found.items() if key not in UNSHOWN]
        print(f"{title} {found['folder']}: {', '.join(facts)}")
        for fact, choice in found.get("choices", {}).items():
            print(f"  {fact} = {choice['value']}  ({choice['source']})")
    for key, value in (report.memory | report.features).items():
        print(f"{key}: {_shown(value)}")
    for problem in report.problems:
        print(f"problem: {problem}")
    verdict = "would serve" if not report.problems else f"would not serve: {len(report.problems)} problem(s)"
    print(f"{Path(str(report.target.get('folder', 'this'))).name}: {verdict}")
    for found in (report.target, report.draft or {}) if tensors else ():
        for tensor in found.get("tensors", ()):
            held = f"{tensor['numbers']:,} numbers per rank"
            lies = f"{tensor['name']} {tensor['shape']} {tensor['dtype']} in {tensor['file']}"
            print(f"  {lies} -> {tensor['goes_to']}, {held}")


def _shown(value: object) -> str:
    """A number with its thousands apart, anything else as it is."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
