import time

import pytest

from benchmarks.overlap import Size, figures
from benchmarks.simulated_device import simulate
from cluster.bench.ranks import RankRun, StepRecord
from cluster.bench.runs import fixed_length_params
from cluster.engine import build_engine
from cluster.request import Request
from tests.parity.harness import config_of, tiny_pair


def record(started_at: float, agree: float = 0.0, decodes: int = 4, prompt_rows: int = 0) -> StepRecord:
    phases = {"schedule": 0.0002, "agree": agree, "commit": 0.0001, "draft": 0.0}
    return StepRecord(started_at, 0.0, 0.0, phases, decodes, prompt_rows, 0, 0)


def test_host_time_is_step_time_without_device_and_peer_waits() -> None:
    """In 6 ms steps the host waits 3.5 ms for the device and 1 ms for a peer; the device waits 0.3 ms for the host."""
    rank_run = RankRun([record(0.0, prompt_rows=9), *(record(0.006 * n, 0.001) for n in range(1, 12))])
    rank_run.extra_times = {
        "wait_seconds": [0.0035] * 11,
        "idle_seconds": [0.0003] * 11,
        "assemble_seconds": [0.0004] * 11,
    }
    two_ranks = figures([rank_run, rank_run], Size(requests=4))
    assert (two_ranks.step_ms, two_ranks.host_ms, two_ranks.parts_ms, two_ranks.gap_share) == pytest.approx(
        (6.0, 1.5, 0.7, 0.05)
    )
    single_rank = figures([rank_run], Size(requests=4))
    assert (single_rank.host_ms, single_rank.parts_ms) == pytest.approx((2.5, 1.7)), "a single rank waits for no peer"


@pytest.mark.parametrize("ahead", [True, False])
def test_simulated_device_overlaps_host_work_only_when_host_runs_ahead(ahead: bool) -> None:
    """A host that does not run ahead waits for the device in every step. A host that runs ahead submits every step to
    the device in time.
    """
    engine = build_engine(config_of(*tiny_pair(), max_running_requests=2))
    device = simulate(engine, 0.02, 2, ahead)
    for name in "ab":
        engine.submit(Request(name, (1, 2, 3), fixed_length_params(30)))
    start_time = time.perf_counter()
    tokens = 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step().outputs)
    assert tokens == 60
    assert time.perf_counter() - start_time >= 0.02 * len(device.idle_seconds)
    assert len(device.wait_seconds) >= 9 and all(waited <= 0.02 for waited in device.wait_seconds)
    assert ahead == (len(device.idle_seconds) > 10), "requests ended while one more step was under way"
