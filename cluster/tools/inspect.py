"""`aerie inspect`: what a checkpoint is and how it would be served, from its headers alone; no weight is read. Of a
model of a hub the headers are read by range requests, and the weights are not downloaded.

A target alone is described without torch, whose import takes longer than all the rest. A draft, several ranks, single
tensors, quantised weights and problems are described by the code that loads them, on torch's meta device.
"""

import argparse
import importlib
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.arch.dtypes import BYTES
from cluster.arch.hub.names import HUB_NAME, hub_model
from cluster.arch.hub.outline import outline
from cluster.arch.hub.snapshot import resolved
from cluster.config import CACHES, ConfigError
from cluster.tools.overrides import add_override_argument, overrides_of
from cluster.tools.summary import ASSUMED_DEVICE, Report, summary

DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA on Linux, and in Windows' subsystem for it
UNSHOWN = ("tensors", "spec", "choices", "doubts", "folder", "quantised")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie inspect`."""
    parser.add_argument("path", metavar="MODEL", help=f"the target: its folder, or {HUB_NAME}")
    parser.add_argument("--draft", metavar="DRAFT", help="the draft: its folder, or its name on a hub")
    parser.add_argument("--tp", type=int, default=1, help="number of ranks")
    parser.add_argument("--dp", type=int, default=1, help="number of attention groups that the ranks form")
    parser.add_argument("--ep", type=int, default=1, help="ep_size: parts that whole experts are divided into")
    parser.add_argument("--dtype", default="auto", choices=["auto", *BYTES])
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        help="what dtype and memory are told for (default: a GPU, and beside it this machine where it has none)",
    )
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=CACHES, help="what the KV caches hold (default: auto, as --dtype)"
    )
    add_override_argument(parser)
    parser.add_argument("--token-map", metavar="FILE", help="speculative_token_map: a .json or .safetensors file")
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its file and use in the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object, tensors included")


def run(args: argparse.Namespace) -> int:
    """Print what was found; returns 1 when it cannot be served.

    Raises:
        ConfigError: flags that do not go together.
    """
    overrides = overrides_of(args.draft_override)
    if args.draft is None and (overrides or args.token_map):
        raise ConfigError("--draft-override and --token-map apply to a draft; give --draft as well")
    with ExitStack() as stack:
        shown: dict[str, str] = {}  # the names of models of a hub by the folders that stand for them
        try:
            folders = [_folder_of(given, stack, shown) for given in (args.path, args.draft)]
        except ConfigError as error:
            report = Report(problems=[str(error)])
        else:
            how = argparse.Namespace(**{**vars(args), "path": folders[0], "draft": folders[1]})
            report = _report(how, overrides, args.device or ASSUMED_DEVICE)
            if args.device is None and not gpu_here():
                report.here = _here(_report(how, overrides, "cpu"), report)
            report = _named(report, shown)
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        _print(report, args.tensors)
    return 1 if report.problems or (report.here or {}).get("problems") else 0


def gpu_here() -> bool:
    """Whether this machine serves on a GPU. torch, which knows, is imported only where there is a driver of one."""
    if not any(Path(driver).exists() for driver in DRIVERS):
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


def _report(args: argparse.Namespace, overrides: dict[str, Any] | None, device: str) -> Report:
    """The report for a device, without torch where that is possible."""
    if args.draft is None and args.tp == args.dp == args.ep == 1 and not args.tensors and not args.json:
        report = summary(args.path, args.dtype, device, args.kv_cache_dtype)
        if report is not None:
            return report
    inspect = importlib.import_module("cluster.tools.tensor_report").inspect
    settings = (overrides, args.token_map)
    how = args.tp, args.dp, args.ep, args.dtype, settings, device, args.kv_cache_dtype
    found: Report = inspect(args.path, args.draft, *how)
    return found


def _here(here: Report, report: Report) -> dict[str, Any]:
    """The memory in the report for this machine, and what else it says otherwise: quantised weights, problems."""
    found = dict(here.memory)
    for name, one, two in (("target", here.target, report.target), ("draft", here.draft or {}, report.draft or {})):
        if one.get("quantised") != two.get("quantised"):
            found[f"{name}_quantised"] = one.get("quantised")
    if here.problems != report.problems:
        found["problems"] = here.problems
    return found


def _folder_of(given: str | None, stack: ExitStack, shown: dict[str, str]) -> str | None:
    """The folder `given`, or one that has the configs and headers of the model of that name on a hub until `stack` is
    closed; what to call that folder is added to `shown`.

    Raises:
        ConfigError: it is not to be had.
    """
    model = None if given is None else hub_model(given)
    if model is None:
        return given
    model = resolved(model)
    folder = stack.enter_context(outline(model))
    shown[folder] = model.shown
    return folder


def _named(report: Report, shown: dict[str, str]) -> Report:
    """The report with the names of models in place of the folders that stood for them."""
    if not shown:
        return report
    text = json.dumps(asdict(report), ensure_ascii=False)
    for folder, name in shown.items():
        text = text.replace(folder, name)
    return Report(**json.loads(text))


def _print(report: Report, tensors: bool) -> None:
    for title, found in (("target", report.target), ("draft", report.draft or {})):
        if not found:
            continue
        facts = [f"{key} {_shown(value)}" for key, value in found.items() if key not in UNSHOWN]
        print(f"{title} {found['folder']}: {', '.join(facts)}")
        for line in found.get("quantised", ()):
            print(f"  {line}")
        for fact, choice in found.get("choices", {}).items():
            print(f"  {fact} = {choice['value']}  ({choice['source']})")
        for doubt in found.get("doubts", ()):
            print(f"  doubt: {doubt}")
    for key, value in (report.memory | report.features).items():
        print(f"{key}: {_shown(value)}")
    if report.here:
        here = ", ".join(f"{key} {_shown(value)}" for key, value in report.here.items())
        print(f"this machine has no GPU; here it is served with: {here}")
    for problem in report.problems:
        print(f"problem: {problem}")
    verdict = "can be served" if not report.problems else f"cannot be served: {len(report.problems)} problem(s)"
    print(f"{Path(str(report.target.get('folder', 'this'))).name}: {verdict}")
    for found in (report.target, report.draft or {}) if tensors else ():
        for tensor in found.get("tensors", ()):
            held = f"{tensor['numbers']:,} numbers per rank"
            lies = f"{tensor['name']} {tensor['shape']} {tensor['dtype']} in {tensor['file']}"
            print(f"  {lies} -> {tensor['goes_to']}, {held}")


def _shown(value: object) -> str:
    """A number with commas between thousands, anything else as it is."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
