"""Where a stage runs and what it says: the same code on a GPU and dry, but for what is here."""

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
    """What a stage is about is not on this machine."""


@dataclass
class Stage:
    """A running stage. `dry`: on a CPU, in the interpreter, on tapes. Its results are lines of `out/results.jsonl`."""

    name: str
    out: Path
    dry: bool
    seed: int
    failed: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def maker(self) -> Callable[[Callable[[], Any]], Captured[Any]]:
        """What captures a program."""
        if self.dry:
            return Tape
        segments = CudaSegments()
        return lambda program: Graph(program, segments)

    def either(self, dry: Any, gpu: Any) -> Any:
        """A size, by where the stage runs."""
        return dry if self.dry else gpu

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if not self.dry:
            torch.cuda.synchronize()

    def say(self, **facts: Any) -> None:
        """Write a line of results now."""
        line = json.dumps({"stage": self.name, **rounded(facts)}, default=str)
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """One thing that must hold, told as a line with the facts that the block adds; a failure in it is noted, and
        the stage goes on.
        """
        facts: dict[str, Any] = {}
        began = time.perf_counter()
        try:
            yield facts
        except NotHereError:
            raise
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            why = f"{type(error).__name__}: {error}"[:400]
            self.say(check=name, passed=False, why=why, s=time.perf_counter() - began, **facts)
            self.wait()  # a device that is lost says so again, and ends the stage: later checks would say nothing
        else:
            self.say(check=name, passed=True, s=time.perf_counter() - began, **facts)

    def near(
        self, facts: dict[str, Any], given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> None:
        """Hold what a device gave to float64: by the norm of the difference over that of what is right. NaN does not
        pass.
        """
        errors = {name: error_of(one, expected[name]) for name, one in given.items()}
        facts["error"] = max([facts.get("error", 0.0), *errors.values()])
        bad = {name: error for name, error in errors.items() if not error <= NEAR}
        assert not bad, f"farther from float64 than {NEAR}: {bad}"


NEAR = 2e-2
"""Of numbers in bfloat16, whose products are within 1e-2; the interpreter cuts them off, where a GPU rounds."""


def error_of(given: torch.Tensor, expected: torch.Tensor) -> float:
    """‖given - expected‖ / ‖expected‖; infinite where there is nothing to divide by but something is given."""
    away = (given.detach().double().cpu() - expected.double().cpu()).norm()
    size = expected.double().norm().cpu()
    return float(away / size) if size else float("inf") if away else 0.0


def _die(stage: Stage) -> None:
    """End amid a line."""
    with (stage.out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"stage": "')
    os._exit(9)


HARM: dict[str, Callable[[Stage], object]] = {
    "hang": lambda _: time.sleep(3600),
    "fail": lambda _: 1 // 0,
    "die": _die,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
}
"""What a test may have happen to a stage."""


def run(name: str, work: Callable[[Stage], None]) -> int:
    """Run a stage by its command line; its exit status: 0, 1 where a check failed, 3 where it cannot be run here."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    faulthandler.enable()
    seed = int(os.environ.get("SEED", 0 if args.dry else time.time_ns() % 1_000_003))
    stage = Stage(name, args.out, args.dry, seed)
    if not args.dry and not torch.cuda.is_available():
        stage.say(check="a CUDA device", passed=False, why="torch sees none; for a CPU there is --dry")
        return 1
    torch.manual_seed(seed)
    broken = dict(one.split(":") for one in os.environ.get("BREAK", "").split())  # of tests: stages, and their harm
    try:
        if name in broken:
            HARM[broken[name]](stage)
        work(stage)
    except NotHereError as error:
        stage.say(check=name, passed=None, why=str(error))
        print(error)
        return 3
    except Exception as error:
        traceback.print_exc()
        stage.say(check=name, passed=False, why=f"{type(error).__name__}: {error}"[:400])
        return 1
    print(f"failed: {', '.join(stage.failed)}" if stage.failed else "all checks passed", file=sys.stderr)
    return 1 if stage.failed else 0
