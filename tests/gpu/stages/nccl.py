"""Communicators in a world of one: collectives are captured and replayed, and aborted with work under way.

What one GPU can show: that captures of collectives replay, that an abort after a missed deadline comes back, that the
process lives and meets again as the next epoch. What it cannot: that ranks wait for each other. Dry it is gloo.
"""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cluster.capture.recorder import opaque
from tests.gpu.stages.stage import Stage, run

DEADLINE = 0.5  # seconds that the device is given
BUSY = 2.0  # seconds that it takes


def meet(stage: Stage) -> None:
    backend = "gloo" if stage.dry else "nccl"
    device: dict[str, Any] = {} if stage.dry else {"device_id": torch.device("cuda", torch.cuda.current_device())}
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60), **device)


def collectives(x: torch.Tensor) -> torch.Tensor:
    """One of each that a step has; on a tape each is one call, as in a step."""
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
    came = torch.empty_like(rows)
    dist.all_to_all_single(came, rows)
    return came


def busy(stage: Stage) -> None:
    """Have the device work for `BUSY` seconds; a CPU has done all work already."""
    if not stage.dry:
        torch.cuda._sleep(int(BUSY * 1.98e9))  # type: ignore[no-untyped-call]


def done_by(stage: Stage, deadline: float) -> bool:
    """Whether the device comes to this point of its work in time."""
    if stage.dry:
        return True
    event, until = torch.cuda.Event(), time.monotonic() + deadline
    event.record()
    while not event.query():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def work(stage: Stage) -> None:
    with stage.check("meet and warm") as facts:
        meet(stage)
        x = torch.randn(1 << 12, device=stage.device)
        assert torch.equal(collectives(x), x * 2 + 1)
        facts["version"] = None if stage.dry else torch.cuda.nccl.version()
    captured = None
    with stage.check("collectives are captured and replayed"):
        captured = stage.maker(lambda: collectives(x))
        for number in range(20):
            x.fill_(number)
            captured.replay()
            stage.wait()
            assert torch.equal(captured.output, x * 2 + 1)
    with stage.check("abort with work under way") as facts:
        busy(stage)
        if captured is not None:
            captured.replay()
        in_time = done_by(stage, DEADLINE)
        assert in_time == stage.dry, "the deadline is missed where the device is busy"
        captured = None  # graphs go before the communicators that they use
        began = time.perf_counter()
        dist.distributed_c10d._abort_process_group()
        facts["abort_s"] = time.perf_counter() - began
        assert facts["abort_s"] < 10
    with stage.check("meet again"):
        stage.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        meet(stage)
        assert torch.equal(collectives(x), x * 2 + 1)
        dist.distributed_c10d._abort_process_group()


if __name__ == "__main__":
    raise SystemExit(run("nccl", work))
