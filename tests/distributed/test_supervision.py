"""A peer is lost on simulated GPUs: the real engine and engine loop end in time and name the lost rank, and streams can
be continued from the tokens that were sent.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.request import Request, RequestParams
from tests.distributed.gang import NOTICE_SLACK, Action, Case, ExitedProcess, RankAnswer, RankFailure, RankProcesses
from tests.distributed.test_parity import config
from tests.parity.harness import tiny_pair

WATCHDOG_TIMEOUT_S = 2.0
MAX_NOTICE_S = (WATCHDOG_TIMEOUT_S + 2.0) * NOTICE_SLACK  # after the fault, at most
# For faults that are noticed without waiting for the watchdog's timeout.
MAX_IMMEDIATE_NOTICE_S = (WATCHDOG_TIMEOUT_S - 0.5) * NOTICE_SLACK
PROMPTS = {"a": [3, 1, 4, 1, 5, 9], "b": [2, 7, 1, 8]}
TOKENS = 80


class SimulatedGpus(RankProcesses):
    """Two rank processes on simulated GPUs. `tokens` are the tokens that the ranks reported, by request.

    `stopped_rank` is the rank whose process the fault stops, if there is one. The process is killed when its peer has
    answered.
    """

    def __init__(self) -> None:
        super().__init__(2, "tests.distributed.behind_worker")
        self.tokens: dict[str, list[int]] = {}
        self.stopped_rank: int | None = None

    def run_fault(self, fault_name: str, guilty: int, **settings: Any) -> list[RankAnswer | None]:
        """Run one request on each rank, with the fault `fault_name` on rank `guilty`; return the ranks' answers.

        A rank that ended without an error answers with `ExitedProcess(0)`.
        """
        self.tokens = {}
        self.stopped_rank = guilty if fault_name == "process stands still" else None
        actions = [Action(0, rank, "submit", request_fields(name)) for rank, name in enumerate(PROMPTS)]
        config_dict = config(
            *tiny_pair(), num_steps=2, tp_size=2, attn_dp_size=2, watchdog_timeout_s=WATCHDOG_TIMEOUT_S, **settings
        )
        case = Case(config_dict, actions, plant=fault_name, guilty=guilty, at_step=8)
        return self.run(case, timeout_s=120)  # type: ignore[return-value]

    def _parse_answer(self, rank: int, line: bytes) -> RankAnswer | None:
        if b'"tokens"' in line:
            name, ids = json.loads(line)["tokens"]
            self.tokens.setdefault(name, []).extend(ids)
            return None
        if b'"ended"' in line:
            return ExitedProcess(0)
        if rank != self.stopped_rank and self.stopped_rank is not None:
            self._processes[self.stopped_rank].kill()
        return super()._parse_answer(rank, line)


def request_fields(request_id: str) -> dict[str, Any]:
    params = {"temperature": 0.8, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True}
    return {"request_id": request_id, "prompt_token_ids": PROMPTS[request_id], "params": params}


def tokens_of_single_rank(request_id: str, sent_tokens: list[int]) -> list[int]:
    """The tokens that a single rank without a draft generates for the request after `sent_tokens`."""
    engine = build_engine(EngineConfig.from_kwargs(config(tiny_pair()[0], None)))
    fields = request_fields(request_id)
    prompt = (*fields["prompt_token_ids"], *sent_tokens)
    engine.submit(Request(request_id, prompt, RequestParams(**fields["params"]), resumed_tokens=len(sent_tokens)))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    return tokens


@pytest.fixture(scope="module")
def gpus() -> Iterator[SimulatedGpus]:
    with SimulatedGpus() as started:
        yield started


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {request_id: tokens_of_single_rank(request_id, []) for request_id in PROMPTS}


def check_peer(
    gpus: SimulatedGpus, peer: RankAnswer | None, guilty: int, expected: dict[str, list[int]], within_s: float
) -> RankFailure:
    """Check that the peer named the guilty rank in time, that the sent tokens are right, and that a single rank
    continues from them with the right tokens. Return the peer's failure.
    """
    assert isinstance(peer, RankFailure) and gpus.fault_time_and_step is not None, peer
    fault_time, fault_step = gpus.fault_time_and_step
    assert peer.kind == "lost" and peer.rank == guilty and f"rank {guilty} " in peer.error, peer
    assert peer.step == fault_step, peer
    assert peer.at - fault_time < within_s, f"{peer.at - fault_time:.2f} s"
    for request_id, sent_tokens in gpus.tokens.items():
        assert 0 < len(sent_tokens) < TOKENS and sent_tokens == expected[request_id][: len(sent_tokens)], request_id
    request_id = next(iter(gpus.tokens))
    assert (
        tokens_of_single_rank(request_id, gpus.tokens[request_id])
        == expected[request_id][len(gpus.tokens[request_id]) :]
    )
    return peer


@pytest.mark.parametrize("guilty", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_frozen_peer_process_is_named_after_the_watchdog_timeout(
    gpus: SimulatedGpus, expected: dict[str, list[int]], guilty: int
) -> None:
    """If the stopped process is that of rank 0, the store of the gang stops as well."""
    answers = gpus.run_fault("process stands still", guilty)
    peer_failure = check_peer(gpus, answers[1 - guilty], guilty, expected, MAX_NOTICE_S)
    assert (
        gpus.fault_time_and_step is not None and peer_failure.at - gpus.fault_time_and_step[0] > WATCHDOG_TIMEOUT_S / 2
    )
    assert "watchdog_timeout_s" in peer_failure.error and (
        "no sign" in peer_failure.error or "have not answered" in peer_failure.error
    )
    assert isinstance(answers[guilty], ExitedProcess)


def test_rank_with_a_hung_device_is_named_by_both_ranks(gpus: SimulatedGpus, expected: dict[str, list[int]]) -> None:
    answers = gpus.run_fault("device stands still", 1)
    check_peer(gpus, answers[0], 1, expected, MAX_NOTICE_S)
    own_failure = answers[1]
    assert (
        isinstance(own_failure, RankFailure)
        and gpus.fault_time_and_step is not None
        and own_failure.at - gpus.fault_time_and_step[0] < MAX_NOTICE_S
    )
    # It depends on chance which of the two ranks is the first to blame rank 1.
    assert own_failure.rank == 1 and ("the device of rank 1" in own_failure.error or "rank 1 " in own_failure.error), (
        own_failure
    )


def test_peer_failing_during_a_step_is_named_at_once_with_its_error(
    gpus: SimulatedGpus, expected: dict[str, list[int]]
) -> None:
    answers = gpus.run_fault("leaves", 1)
    peer_failure = check_peer(gpus, answers[0], 1, expected, MAX_IMMEDIATE_NOTICE_S)
    assert "rank 1 left: ValueError: a bug of this rank alone" in peer_failure.error


@pytest.mark.parametrize("guilty", [0, 1])
def test_dead_peer_is_named_at_once(gpus: SimulatedGpus, expected: dict[str, list[int]], guilty: int) -> None:
    answers = gpus.run_fault("dies", guilty)
    check_peer(gpus, answers[1 - guilty], guilty, expected, MAX_IMMEDIATE_NOTICE_S)
    assert isinstance(answers[guilty], ExitedProcess)


def test_device_failure_during_replay_names_the_failed_rank(
    gpus: SimulatedGpus, expected: dict[str, list[int]]
) -> None:
    """The peer gets an error from the next call to its own device, and blames the failed rank. The failed rank reports
    the error of its device.
    """
    answers = gpus.run_fault("aborts", 1, capture="on", dp_padding="padded")
    check_peer(gpus, answers[0], 1, expected, MAX_IMMEDIATE_NOTICE_S)
    own_failure = answers[1]
    assert isinstance(own_failure, RankFailure) and (own_failure.kind, own_failure.rank, own_failure.phase) == (
        "failed",
        1,
        "replay",
    ), own_failure
    assert "CUDA error" in own_failure.error


def test_step_longer_than_the_watchdog_timeout_continues(gpus: SimulatedGpus, expected: dict[str, list[int]]) -> None:
    answers = gpus.run_fault("slow", 1)
    assert gpus.fault_time_and_step is not None and answers == [ExitedProcess(0), ExitedProcess(0)], answers
    assert gpus.tokens == expected
