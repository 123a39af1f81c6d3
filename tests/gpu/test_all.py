"""`all.sh --dry`: every stage runs and passes with only what a GPU machine has, and a broken one is named."""

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

from tests.gpu.stages.summary import read

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
STAGES = re.findall(r"^    (\w+) +(\d+)$", (FOLDER / "all.sh").read_text(), re.MULTILINE)
EACH = {  # a check that shows what a stage is about
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
    "flashinfer": "an engine's tokens",
}

QUICK = ("ceilings", "capture", "nccl")


def needs() -> list[str]:
    lines = (FOLDER / "needs.txt").read_text().splitlines()
    return [spelled(line) for line in lines if line and not line.startswith("#")]


def spelled(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def at_hand() -> set[str]:
    """torch, triton and transformers with all that they need, but for what has to be carried."""
    found, left = set[str](), ["torch", "triton", "transformers"]
    while left:
        name = left.pop()
        if name in found or name in needs():
            continue
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # of another system, or of Python
        found.add(name)
        left += [spelled(re.split(r"[^\w.-]", one)[0]) for one in required if "extra ==" not in one]
    return found


def only(names: set[str], folder: Path) -> Path:
    """A folder of packages with no others, to be put in the place of all that are installed."""
    folder.mkdir()
    for name in names:
        files = distribution(name).files
        assert files, name
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


def begun(tmp: Path, **environment: str) -> subprocess.Popen[str]:
    """`all.sh --dry`, on its way."""
    python = tmp / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    site = tmp / "site" if (tmp / "site").exists() else only(at_hand() | set(needs()), tmp / "site")
    own = {name: value for name, value in os.environ.items() if name not in ("BACKEND", "TRITON_INTERPRET")}
    own |= {"PYTHON": str(python), "PYTHONPATH": str(site), **environment}
    command = ["bash", str(FOLDER / "all.sh"), "--dry", str(tmp / "out")]
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True)


def run(tmp: Path, **environment: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """`all.sh --dry`; its end, its summary, and the lines of its results."""
    done = begun(tmp, **environment)
    said, _ = done.communicate()
    return done.returncode, json.loads(said.splitlines()[-1]), read(tmp / "out" / "results.jsonl")


@pytest.mark.parametrize("stages", [QUICK, pytest.param(tuple(EACH), marks=[pytest.mark.slow, pytest.mark.early])])
@pytest.mark.timeout(1800)
def test_dry_stages_pass_with_only_the_packages_of_a_gpu_machine(stages: tuple[str, ...], tmp_path: Path) -> None:
    rc, summary, lines = run(tmp_path, STAGES=" ".join(stages))
    logs = {name: one for name, one in summary["stages"].items() if one["status"] != "passed"}
    assert rc == 0 and summary["passed"] and not logs, json.dumps(logs, indent=1)
    assert list(summary["stages"]) == list(stages) and [name for name, _ in STAGES] == list(EACH)
    for name in stages:
        shown = [line for line in lines if line["stage"] == name and line.get("check") == EACH[name]]
        assert any(line["passed"] for line in shown), name
    assert [line["stage"] for line in lines if "status" in line] == list(stages), "in this order, so a cut run counts"
    figures = [figure for one in summary["stages"].values() for figure in one["figures"]]
    both = {figure["captured"] for figure in figures if "captured" in figure} == {False, True}
    assert both or stages == QUICK, "of those some are captured and some are not"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_broken_stages_are_named_and_other_stages_still_run(tmp_path: Path) -> None:
    harms = {"ceilings": "fail", "syncs": "die", "capture": "hang", "roofline_mla": "kill"}
    stages = ["ceilings", "syncs", "capture", "nccl", "roofline_mla"]
    broken = " ".join(f"{stage}:{harm}" for stage, harm in harms.items())
    rc, summary, _ = run(tmp_path, STAGES=" ".join(stages), BREAK=broken, SECONDS_capture="8")
    assert rc == 1 and not summary["passed"] and summary["bad"] == [*harms]
    found = {name: one["status"] for name, one in summary["stages"].items()}
    assert found == dict(zip(stages, ["failed", "ended", "cut", "passed", "killed"], strict=True))
    assert "ZeroDivisionError" in summary["stages"]["ceilings"]["failed"]["ceilings"]
    assert all(summary["stages"][name]["why"] for name in harms)


@pytest.mark.timeout(900)
def test_terminated_run_prints_its_summary_and_leaves_no_process(tmp_path: Path) -> None:
    """Whoever reads its output to the end waits for all that hold it."""
    going = begun(tmp_path, STAGES="capture nccl", BREAK="capture:hang", SECONDS_capture="3000")
    while not (tmp_path / "out" / "capture.log").exists():
        time.sleep(0.1)
    going.terminate()
    said, _ = going.communicate(timeout=600)
    summary = json.loads(said.splitlines()[-1])
    assert going.returncode == 1 and summary["bad"] == ["capture", "nccl"]
    assert {one["why"] for one in summary["stages"].values()} == {"cut off"}


def test_stage_time_limits_fit_into_two_device_calls() -> None:
    """A call may take 540 s, each stage all of its own; a stage is not begun in the last 5 s."""
    text = (FOLDER / "all.sh").read_text()
    assert "SECONDS_IN_ALL:-$((540 *" in text
    times = {name: int(most) for name, most in STAGES}
    begins = list(times).index("attention")  # the first of the second call
    first, second = list(times.values())[:begins], list(times.values())[begins:]
    assert sum(first) <= 535 and sum(second) <= 535


def test_engine_import_fails_without_the_carried_packages(tmp_path: Path) -> None:
    """Without it the engine cannot be imported, so the folder of the first test has nothing else."""
    site = only(at_hand() | {"typing-extensions"}, tmp_path / "site")
    command = [sys.executable, "-S", "-c", "import cluster.engine"]
    environment = os.environ | {"PYTHONPATH": f"{site}:{ROOT}"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "No module named 'pydantic'" in done.stderr
