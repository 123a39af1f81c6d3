"""NCCL collectives in a world of one rank: they are captured and replayed, and aborted while work is running.

One GPU can show that captured collectives replay, that an abort after a missed deadline returns, and that the process
survives and can join a new process group. It cannot show that ranks wait for each other. A dry run uses gloo.
"""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cluster.capture.recorder import opaque
from tests.gpu.stages.stage import Stage, run

DEADLINE_S = 0.5  # the time limit for the work of the device
BUSY_S = 2.0  # the time that the work takes


def init_group(stage: Stage) -> None:
    backend = "gloo" if stage.dry else "nccl"
    device: dict[str, Any] = {} if stage.dry else {"device_id": torch.device("cuda", torch.cuda.current_device())}
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60), **device)


def collectives(x: torch.Tensor) -> torch.Tensor:
    """Run one collective of each kind that a step uses. On a tape each collective is one call, as in a step."""
    rows = x * 2
    for collective in (reduced, gathered, scattered, exchanged):
        rows = opaque(collective, rows)
    return rows + 1


def reduced(rows: torch.Tensor) -> torch.Tensor:
    total = rows.clone()
    dist.all_reduce(total)
    return total


def gathered(rows: torch.Tensor) -> torch.Tensor:
    every = torch.empty_like(rows)
    dist.all_gather_into_tensor(every, rows)
    return every


def scattered(rows: torch.Tensor) -> torch.Tensor:
    own = torch.empty_like(rows)
    dist.reduce_scatter_tensor(own, rows)
    return own


def exchanged(rows: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received


def keep_device_busy(stage: Stage) -> None:
    """Start work of `BUSY_S` seconds on the GPU. In a dry run do nothing: a CPU runs all work at once."""
    if not stage.dry:
        torch.cuda._sleep(int(BUSY_S * 1.98e9))  # type: ignore[no-untyped-call]


def finishes_within(stage: Stage, deadline: float) -> bool:
    """Return whether the device finishes all work that has been started so far within `deadline` seconds."""
    if stage.dry:
        return True
    event, give_up_at = torch.cuda.Event(), time.monotonic() + deadline
    event.record()
    while not event.query():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.01)
    return True


def work(stage: Stage) -> None:
    with stage.check("join a process group and run collectives") as facts:
        init_group(stage)
        x = torch.randn(1 << 12, device=stage.device)
        assert torch.equal(collectives(x), x * 2 + 1)
        facts["version"] = None if stage.dry else torch.cuda.nccl.version()
    captured = None
    with stage.check("collectives are captured and replayed"):
        captured = stage.capture(lambda: collectives(x))
        for number in range(20):
            x.fill_(number)
            captured.replay()
            stage.wait()
            assert torch.equal(captured.output, x * 2 + 1)
    with stage.check("abort while work is running") as facts:
        keep_device_busy(stage)
        if captured is not None:
            captured.replay()
        in_time = finishes_within(stage, DEADLINE_S)
        assert in_time == stage.dry, "a busy device must miss the deadline"
        captured = None  # a graph must be deleted before the communicators that it uses
        start = time.perf_counter()
        dist.distributed_c10d._abort_process_group()
        facts["abort_s"] = time.perf_counter() - start
        assert facts["abort_s"] < 10
    with stage.check("join a new process group"):
        stage.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        init_group(stage)
        assert torch.equal(collectives(x), x * 2 + 1)
        dist.distributed_c10d._abort_process_group()


if __name__ == "__main__":
    raise SystemExit(run("nccl", work))
