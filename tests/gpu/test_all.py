"""Tests of `all.sh --dry`: every stage passes with only the packages of a GPU machine, and a broken stage is named."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.stages.summary import read_results

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
STAGES = re.findall(r"^    (\w+) +(\d+)$", (FOLDER / "all.sh").read_text(), re.MULTILINE)
CHECK_OF_STAGE = {  # for each stage, a check that it must have run
    "ceilings": "product in bfloat16",
    "kernels": "choose, noise",
    "tokens": "topk 2, temperature 0.8, captured",
    "demo": "temperature 0.8, chain of 3",
    "syncs": "200 steps, captured",
    "capture": "capture, sizes 1, 2, 4",
    "nccl": "collectives are captured and replayed",
    "ranks": "data parallel, captured, padded",
    "attention": "attention, FP8, latent, all",
    "roofline_llama": "roofline of llama-8b",
    "roofline_qwen3": "roofline of qwen3-30b-a3b",
    "roofline_mla": "roofline of mla",
    "adaptive": "temperature 0.8, 8 looked-up tokens",
    "flashinfer": "an engine's tokens",
}

QUICK = ("ceilings", "capture", "nccl")


def carried_packages() -> list[str]:
    """Return the packages that must be copied to a GPU machine, from needs.txt."""
    lines = (FOLDER / "needs.txt").read_text().splitlines()
    return [normalised_name(line) for line in lines if line and not line.startswith("#")]


def normalised_name(name: str) -> str:
    """Return the normalised form of a package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def gpu_machine_packages() -> set[str]:
    """Return the packages that a GPU machine has: torch, triton, transformers and their dependencies, without the
    packages of needs.txt.
    """
    packages, to_visit = set[str](), ["torch", "triton", "transformers"]
    while to_visit:
        name = to_visit.pop()
        if name in packages or name in carried_packages():
            continue
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # a requirement of another platform or another Python version
        packages.add(name)
        to_visit += [
            normalised_name(re.split(r"[^\w.-]", requirement)[0])
            for requirement in required
            if "extra ==" not in requirement
        ]
    return packages


def package_folder(names: set[str], folder: Path) -> Path:
    """Make a folder with links to these packages only. It replaces site-packages on the path of Python.

    Packages may share a folder: with a CUDA build of torch, many install into `nvidia`.
    """
    folder.mkdir()
    targets: dict[str, Path] = {}
    for name in names:
        files = distribution(name).files
        assert files, name
        for top_level in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            targets[top_level] = Path(str(distribution(name).locate_file(top_level)))
    for top_level, target in targets.items():
        (folder / top_level).symlink_to(target)
    return folder


def start_dry_run(tmp: Path, **environment: str) -> subprocess.Popen[str]:
    """Start `all.sh --dry` and return the running process."""
    python = tmp / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    site = (
        tmp / "site"
        if (tmp / "site").exists()
        else package_folder(gpu_machine_packages() | set(carried_packages()), tmp / "site")
    )
    process_environment = {
        name: value for name, value in os.environ.items() if name not in ("BACKEND", "TRITON_INTERPRET")
    }
    process_environment |= {"PYTHON": str(python), "PYTHONPATH": str(site), **environment}
    command = ["bash", str(FOLDER / "all.sh"), "--dry", str(tmp / "out")]
    return subprocess.Popen(command, env=process_environment, stdout=subprocess.PIPE, text=True)


def run(tmp: Path, **environment: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Run `all.sh --dry` and return its exit status, its summary, and the lines of its results."""
    process = start_dry_run(tmp, **environment)
    stdout, _ = process.communicate()
    return process.returncode, json.loads(stdout.splitlines()[-1]), read_results(tmp / "out" / "results.jsonl")


@pytest.mark.parametrize(
    "stages", [QUICK, pytest.param(tuple(CHECK_OF_STAGE), marks=[pytest.mark.slow, pytest.mark.early])]
)
@pytest.mark.timeout(1800)
def test_dry_stages_pass_with_only_the_packages_of_a_gpu_machine(stages: tuple[str, ...], tmp_path: Path) -> None:
    rc, summary, lines = run(tmp_path, STAGES=" ".join(stages))
    logs = {
        name: stage_summary for name, stage_summary in summary["stages"].items() if stage_summary["status"] != "passed"
    }
    assert rc == 0 and summary["passed"] and not logs, json.dumps(logs, indent=1)
    assert list(summary["stages"]) == list(stages) and [name for name, _ in STAGES] == list(CHECK_OF_STAGE)
    for name in stages:
        check_lines = [line for line in lines if line["stage"] == name and line.get("check") == CHECK_OF_STAGE[name]]
        assert any(line["passed"] for line in check_lines), name
    assert [line["stage"] for line in lines if "status" in line] == list(stages), "the stages must run in this order"
    figures = [figure for stage_summary in summary["stages"].values() for figure in stage_summary["figures"]]
    both_kinds = {figure["captured"] for figure in figures if "captured" in figure} == {False, True}
    assert both_kinds or stages == QUICK, "some figures must be of captured steps, and some not"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_broken_stages_are_named_and_other_stages_still_run(tmp_path: Path) -> None:
    faults = {"ceilings": "fail", "syncs": "die", "capture": "hang", "roofline_mla": "kill"}
    stages = ["ceilings", "syncs", "capture", "nccl", "roofline_mla"]
    broken = " ".join(f"{stage}:{fault}" for stage, fault in faults.items())
    rc, summary, _ = run(tmp_path, STAGES=" ".join(stages), BREAK=broken, SECONDS_capture="8")
    assert rc == 1 and not summary["passed"] and summary["bad"] == [*faults]
    statuses = {name: stage_summary["status"] for name, stage_summary in summary["stages"].items()}
    assert statuses == dict(zip(stages, ["failed", "ended", "cut", "passed", "killed"], strict=True))
    assert "ZeroDivisionError" in summary["stages"]["ceilings"]["failed"]["ceilings"]
    assert all(summary["stages"][name]["why"] for name in faults)


@pytest.mark.timeout(900)
def test_terminated_run_prints_its_summary_and_leaves_no_process(tmp_path: Path) -> None:
    """`communicate` returns only when no process has the output open any more, so no process of a stage is left."""
    process = start_dry_run(tmp_path, STAGES="capture nccl", BREAK="capture:hang", SECONDS_capture="3000")
    while not (tmp_path / "out" / "capture.log").exists():
        time.sleep(0.1)
    process.terminate()
    stdout, _ = process.communicate(timeout=600)
    summary = json.loads(stdout.splitlines()[-1])
    assert process.returncode == 1 and summary["bad"] == ["capture", "nccl"]
    assert {stage_summary["why"] for stage_summary in summary["stages"].values()} == {"cut off"}


def test_stage_time_limits_fit_into_two_device_calls() -> None:
    """A call may take 540 s. Each stage may use all of its time limit, and no stage is started in the last 5 s."""
    text = (FOLDER / "all.sh").read_text()
    assert "SECONDS_IN_ALL:-$((540 *" in text
    limits = {name: int(seconds) for name, seconds in STAGES}
    second_call_start = list(limits).index("attention")  # the first stage of the second call
    first, second = list(limits.values())[:second_call_start], list(limits.values())[second_call_start:]
    assert sum(first) <= 535 and sum(second) <= 535


def test_engine_import_fails_without_the_carried_packages(tmp_path: Path) -> None:
    """The import fails, so the package folder of the tests above really hides all other installed packages."""
    site = package_folder(gpu_machine_packages() | {"typing-extensions"}, tmp_path / "site")
    command = [sys.executable, "-S", "-c", "import cluster.engine"]
    environment = os.environ | {"PYTHONPATH": f"{site}:{ROOT}"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode and "No module named 'pydantic'" in result.stderr
