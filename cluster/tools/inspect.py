"""`aerie inspect`: describe a checkpoint and how it would be served, from configs and tensor headers. No weight is
read. The headers of a model on a hub are read by range requests, so its weights are not downloaded.

A target alone is described without torch, because importing torch takes longer than everything else. For a draft,
several ranks, the list of tensors, JSON output, quantised weights, attention scales and problems, the loading code runs
on torch's meta device.
"""

import argparse
import importlib
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.arch.dtypes import COMPUTE_DTYPE_BYTES
from cluster.arch.hub.names import HUB_NAME, hub_model
from cluster.arch.hub.outline import header_folder
from cluster.arch.hub.snapshot import resolve_commit
from cluster.config import KV_CACHE_DTYPES, ConfigError
from cluster.tools.engine_flags import add_override_argument, parse_overrides
from cluster.tools.summary import ASSUMED_DEVICE, Report, summary

DRIVER_DEVICES = (
    "/dev/nvidiactl",
    "/dev/dxg",
)  # device files of NVIDIA's driver: Linux, and Windows Subsystem for Linux
POOL_FACTS = ("kv_pools", "kv_request_bytes")
HIDDEN_FACTS = ("tensors", "spec", "choices", "doubts", "folder", "quantised")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie inspect`."""
    parser.add_argument("path", metavar="MODEL", help=f"the target: its folder, or {HUB_NAME}")
    parser.add_argument("--draft", metavar="DRAFT", help="the draft: its folder, or its name on a hub")
    parser.add_argument("--tp", type=int, default=1, help="number of ranks")
    parser.add_argument("--dp", type=int, default=1, help="number of attention groups that the ranks form")
    parser.add_argument("--ep", type=int, default=1, help="ep_size: parts that whole experts are divided into")
    parser.add_argument("--dtype", default="auto", choices=["auto", *COMPUTE_DTYPE_BYTES])
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        help="what dtype and memory are told for (default: a GPU, and beside it this machine where it has none)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=KV_CACHE_DTYPES,
        help="what the KV caches hold (default: auto, as --dtype)",
    )
    add_override_argument(parser)
    parser.add_argument("--token-map", metavar="FILE", help="speculative_token_map: a .json or .safetensors file")
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its file and use in the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object, tensors included")


def run(args: argparse.Namespace) -> int:
    """Print the report. Return 1 if the model cannot be served on the device of the report, or on this machine if that
    is described too; otherwise return 0.

    Raises:
        ConfigError: an override is wrong, or a flag of the draft is given without --draft.
    """
    overrides = parse_overrides(args.draft_override)
    if args.draft is None and (overrides or args.token_map):
        raise ConfigError("--draft-override and --token-map apply to a draft; give --draft as well")
    with ExitStack() as stack:
        hub_names: dict[str, str] = {}  # temporary folder of headers -> name of the model on a hub
        try:
            folders = [_local_folder(model, stack, hub_names) for model in (args.path, args.draft)]
        except ConfigError as error:
            report = Report(problems=[str(error)])
        else:
            resolved_args = argparse.Namespace(**{**vars(args), "path": folders[0], "draft": folders[1]})
            report = _report(resolved_args, overrides, args.device or ASSUMED_DEVICE)
            if args.device is None and not has_gpu():
                report.here = _cpu_differences(_report(resolved_args, overrides, "cpu"), report)
            report = _with_hub_names(report, hub_names)
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        _print(report, args.tensors)
    return 1 if report.problems or (report.here or {}).get("problems") else 0


def has_gpu() -> bool:
    """Return whether this machine has a GPU to serve on. Import torch only if NVIDIA's driver has a device file."""
    if not any(Path(driver).exists() for driver in DRIVER_DEVICES):
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


def _report(args: argparse.Namespace, overrides: dict[str, Any] | None, device: str) -> Report:
    """Return the report for a device, without importing torch if possible."""
    if args.draft is None and args.tp == args.dp == args.ep == 1 and not args.tensors and not args.json:
        report = summary(args.path, args.dtype, device, args.kv_cache_dtype)
        if report is not None:
            return report
    module = importlib.import_module("cluster.tools.tensor_report")
    setup = module.ServingSetup(args.tp, args.dp, args.ep, args.dtype, device, args.kv_cache_dtype)
    report_of_tensors: Report = module.inspect(args.path, args.draft, setup, (overrides, args.token_map))
    return report_of_tensors


def _cpu_differences(cpu_report: Report, gpu_report: Report) -> dict[str, Any]:
    """Return the entries of `memory` of `cpu_report`. If the two reports differ in their quantised weights or in their
    problems, add those of `cpu_report`.
    """
    differences = dict(cpu_report.memory)
    for name, on_cpu, on_gpu in (
        ("target", cpu_report.target, gpu_report.target),
        ("draft", cpu_report.draft or {}, gpu_report.draft or {}),
    ):
        if on_cpu.get("quantised") != on_gpu.get("quantised"):
            differences[f"{name}_quantised"] = on_cpu.get("quantised")
    if cpu_report.problems != gpu_report.problems:
        differences["problems"] = cpu_report.problems
    return differences


def _local_folder(model_argument: str | None, stack: ExitStack, hub_names: dict[str, str]) -> str | None:
    """Return `model_argument` if it is a folder or None. If it is the name of a model on a hub, return a temporary
    folder with the model's configs and headers. The folder exists until `stack` is closed. `hub_names` then maps the
    folder to the name.

    Raises:
        ConfigError: the model cannot be read from the hub.
    """
    model = None if model_argument is None else hub_model(model_argument)
    if model is None:
        return model_argument
    model = resolve_commit(model)
    folder = stack.enter_context(header_folder(model))
    hub_names[folder] = model.display_name
    return folder


def _with_hub_names(report: Report, hub_names: dict[str, str]) -> Report:
    """Return the report with temporary folders replaced by the names of their models."""
    if not hub_names:
        return report
    text = json.dumps(asdict(report), ensure_ascii=False)
    for folder, name in hub_names.items():
        text = text.replace(folder, name)
    return Report(**json.loads(text))


def _print(report: Report, tensors: bool) -> None:
    for title, model_report in (("target", report.target), ("draft", report.draft or {})):
        if not model_report:
            continue
        facts = [f"{key} {_formatted(value)}" for key, value in model_report.items() if key not in HIDDEN_FACTS]
        print(f"{title} {model_report['folder']}: {', '.join(facts)}")
        for line in model_report.get("quantised", ()):
            print(f"  {line}")
        for fact, choice in model_report.get("choices", {}).items():
            print(f"  {fact} = {choice['value']}  ({choice['source']})")
        for doubt in model_report.get("doubts", ()):
            print(f"  doubt: {doubt}")
    for key, value in (report.memory | report.features).items():
        if key == "kv_pools":
            print("\n".join(f"  KV pool of {pool}" for pool in value))
        elif key == "kv_request_bytes":
            sizes = (f"{size:,} bytes for {int(tokens):,} tokens" for tokens, size in value.items())
            print(f"KV of a request on each rank: {', '.join(sizes)}")
        else:
            print(f"{key}: {_formatted(value)}")
    if report.here:
        here = ", ".join(f"{key} {_formatted(value)}" for key, value in report.here.items() if key not in POOL_FACTS)
        print(f"this machine has no GPU; here it is served with: {here}")
    for problem in report.problems:
        print(f"problem: {problem}")
    verdict = "can be served" if not report.problems else f"cannot be served: {len(report.problems)} problem(s)"
    print(f"{Path(str(report.target.get('folder', 'this'))).name}: {verdict}")
    for model_report in (report.target, report.draft or {}) if tensors else ():
        for tensor in model_report.get("tensors", ()):
            elements = f"{tensor['numbers']:,} numbers per rank"
            stored_tensor = f"{tensor['name']} {tensor['shape']} {tensor['dtype']} in {tensor['file']}"
            print(f"  {stored_tensor} -> {tensor['goes_to']}, {elements}")


def _formatted(value: object) -> str:
    """Return an integer with commas between thousands, and any other value as `str`."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
