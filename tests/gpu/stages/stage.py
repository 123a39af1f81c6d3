"""The environment of a stage: its device, its sizes and its results.

A stage runs the same code on a GPU and in a dry run on a CPU. All differences between the two are in this module.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cluster.bench.report import rounded
from cluster.capture.cuda_graph import CudaSegments, Graph
from cluster.capture.recorder import Captured
from cluster.capture.tape import Tape


class NotHereError(Exception):
    """The subject of a stage (such as FlashInfer) is not available on this machine."""


@dataclass
class Stage:
    """A running stage. It appends its results as lines to `out/results.jsonl`.

    With `dry` it runs on a CPU: Triton's interpreter replaces compiled kernels, and tapes replace CUDA graphs.
    """

    name: str
    out: Path
    dry: bool
    seed: int
    failed: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def capture(self) -> Callable[[Callable[[], Any]], Captured[Any]]:
        """The function that captures a program: as a tape in a dry run, else as a CUDA graph."""
        if self.dry:
            return Tape
        segments = CudaSegments()
        return lambda program: Graph(program, segments)

    def dry_or_gpu(self, dry: Any, gpu: Any) -> Any:
        """Return `dry` in a dry run, else `gpu`. Sizes are smaller in a dry run."""
        return dry if self.dry else gpu

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        if not self.dry:
            torch.cuda.synchronize()

    def write_line(self, **facts: Any) -> None:
        """Append a line with these facts to the results at once."""
        line = json.dumps({"stage": self.name, **rounded(facts)}, default=str)
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Run the block as one check, and write a line with its result and the facts that the block adds.

        If the block raises an error, the check has failed and the stage continues with the next check.
        """
        facts: dict[str, Any] = {}
        start = time.perf_counter()
        try:
            yield facts
        except NotHereError:
            raise
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            why = f"{type(error).__name__}: {error}"[:400]
            self.write_line(check=name, passed=False, why=why, s=time.perf_counter() - start, **facts)
            self.wait()  # raises if the device is lost, and ends the stage: later checks would prove nothing
        else:
            self.write_line(check=name, passed=True, s=time.perf_counter() - start, **facts)

    def check_close(
        self, facts: dict[str, Any], actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> None:
        """Compare the results of a device with the expected results in float64, by `error_of`. NaN fails."""
        errors = {name: error_of(tensor, expected[name]) for name, tensor in actual.items()}
        facts["error"] = max([facts.get("error", 0.0), *errors.values()])
        bad = {name: error for name, error in errors.items() if not error <= NEAR}
        assert not bad, f"relative errors above {NEAR}: {bad}"


NEAR = 2e-2
"""The largest allowed relative error of results in bfloat16. Products are within 1e-2, but Triton's interpreter
truncates to bfloat16 where a GPU rounds.
"""


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖actual - expected‖ / ‖expected‖. It is infinite if only `expected` is zero."""
    distance = (actual.detach().double().cpu() - expected.double().cpu()).norm()
    expected_norm = expected.double().norm().cpu()
    return float(distance / expected_norm) if expected_norm else float("inf") if distance else 0.0


def _die_mid_line(stage: Stage) -> None:
    """End the process in the middle of a line of results."""
    with (stage.out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"stage": "')
    os._exit(9)


FAULTS: dict[str, Callable[[Stage], object]] = {
    "hang": lambda _: time.sleep(3600),
    "fail": lambda _: 1 // 0,
    "die": _die_mid_line,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
}
"""The faults that a test can inject into a stage with the environment variable BREAK."""


def run(name: str, work: Callable[[Stage], None]) -> int:
    """Run a stage with the arguments of the command line, and return the exit status of the process.

    0: all checks passed. 1: a check failed. 3: the stage cannot run on this machine.
    """
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    faulthandler.enable()
    seed = int(os.environ.get("SEED", 0 if args.dry else time.time_ns() % 1_000_003))
    stage = Stage(name, args.out, args.dry, seed)
    if not args.dry and not torch.cuda.is_available():
        stage.write_line(check="a CUDA device", passed=False, why="torch finds none; on a CPU use --dry")
        return 1
    torch.manual_seed(seed)
    # BREAK is set by tests: names of stages, each with a fault.
    fault_of_stage = dict(entry.split(":") for entry in os.environ.get("BREAK", "").split())
    try:
        if name in fault_of_stage:
            FAULTS[fault_of_stage[name]](stage)
        work(stage)
    except NotHereError as error:
        stage.write_line(check=name, passed=None, why=str(error))
        print(error)
        return 3
    except Exception as error:
        traceback.print_exc()
        stage.write_line(check=name, passed=False, why=f"{type(error).__name__}: {error}"[:400])
        return 1
    print(f"failed: {', '.join(stage.failed)}" if stage.failed else "all checks passed", file=sys.stderr)
    return 1 if stage.failed else 0
