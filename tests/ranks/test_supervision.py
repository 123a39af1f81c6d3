"""A lost GPU peer, on simulated devices: the real engine and loop end in time, name the rank, and streams go on."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.request import Request, RequestParams
from tests.parity.harness import tiny_pair
from tests.ranks.gang import Action, Answer, Case, Dead, Lost, Ranks
from tests.ranks.test_parity import config

LIMIT_S = 2.0
WITHIN_S = LIMIT_S + 2.0  # of the fault
AT_ONCE_S = LIMIT_S - 0.5  # what needs no limit to pass
PROMPTS = {"a": [3, 1, 4, 1, 5, 9], "b": [2, 7, 1, 8]}
TOKENS = 80


class Gpus(Ranks):
    """Ranks on simulated devices; `tokens` are those that came, by request. A rank that stands still is killed when
    its peer has answered.
    """

    def __init__(self) -> None:
        super().__init__(2, "tests.ranks.behind_worker")
        self.tokens: dict[str, list[int]] = {}
        self.frozen: int | None = None

    def of(self, plant: str, guilty: int, **settings: Any) -> list[Answer | None]:
        self.tokens = {}
        self.frozen = guilty if plant == "process stands still" else None
        actions = [Action(0, rank, "submit", asked(name)) for rank, name in enumerate(PROMPTS)]
        given = config(*tiny_pair(), num_steps=2, tp_size=2, attn_dp_size=2, watchdog_timeout_s=LIMIT_S, **settings)
        case = Case(given, actions, plant=plant, guilty=guilty, at_step=8)
        return self.run(case, timeout_s=120)  # type: ignore[return-value]

    def _answer(self, rank: int, line: bytes) -> Answer | None:
        if b'"tokens"' in line:
            name, ids = json.loads(line)["tokens"]
            self.tokens.setdefault(name, []).extend(ids)
            return None
        if b'"ended"' in line:
            return Dead(0)
        if rank != self.frozen and self.frozen is not None:
            self._processes[self.frozen].kill()
        return super()._answer(rank, line)


def asked(name: str) -> dict[str, Any]:
    params = {"temperature": 0.8, "seed": 7, "max_tokens": TOKENS, "ignore_eos": True}
    return {"request_id": name, "prompt_token_ids": PROMPTS[name], "params": params}


def alone(name: str, sent: list[int]) -> list[int]:
    """What the request is given after the tokens that were sent, by a rank alone and without a draft."""
    engine = build_engine(EngineConfig.from_kwargs(config(tiny_pair()[0], None)))
    fields = asked(name)
    prompt = (*fields["prompt_token_ids"], *sent)
    engine.submit(Request(name, prompt, RequestParams(**fields["params"]), resumed_tokens=len(sent)))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    return tokens


@pytest.fixture(scope="module")
def gpus() -> Iterator[Gpus]:
    with Gpus() as started:
        yield started


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {name: alone(name, []) for name in PROMPTS}


def check(gpus: Gpus, peer: Answer | None, guilty: int, expected: dict[str, list[int]], within_s: float) -> Lost:
    """The peer named the guilty rank in time, what was sent is right, and what is left follows from it."""
    assert isinstance(peer, Lost) and gpus.struck is not None, peer
    struck, step = gpus.struck
    assert peer.kind == "lost" and peer.rank == guilty and f"rank {guilty} " in peer.error, peer
    assert peer.step == step, peer
    assert peer.at - struck < within_s, f"{peer.at - struck:.2f} s"
    for name, sent in gpus.tokens.items():
        assert 0 < len(sent) < TOKENS and sent == expected[name][: len(sent)], name
    name = next(iter(gpus.tokens))
    assert alone(name, gpus.tokens[name]) == expected[name][len(gpus.tokens[name]) :]
    return peer


@pytest.mark.parametrize("guilty", [0, 1])
def test_frozen_peer_process_is_named_after_the_watchdog_timeout(
    gpus: Gpus, expected: dict[str, list[int]], guilty: int
) -> None:
    """Where it is rank 0, the store of the gang stands still as well."""
    answers = gpus.of("process stands still", guilty)
    said = check(gpus, answers[1 - guilty], guilty, expected, WITHIN_S)
    assert gpus.struck is not None and said.at - gpus.struck[0] > LIMIT_S / 2
    assert "watchdog_timeout_s" in said.error and ("no sign" in said.error or "have not answered" in said.error)
    assert isinstance(answers[guilty], Dead)


def test_rank_with_a_hung_device_is_named_by_both_ranks(gpus: Gpus, expected: dict[str, list[int]]) -> None:
    answers = gpus.of("device stands still", 1)
    check(gpus, answers[0], 1, expected, WITHIN_S)
    own = answers[1]
    assert isinstance(own, Lost) and gpus.struck is not None and own.at - gpus.struck[0] < WITHIN_S
    # which of the two is first to say so is a matter of chance
    assert own.rank == 1 and ("the device of rank 1" in own.error or "rank 1 " in own.error), own


def test_peer_failing_during_a_step_is_named_at_once_with_its_error(gpus: Gpus, expected: dict[str, list[int]]) -> None:
    answers = gpus.of("leaves", 1)
    said = check(gpus, answers[0], 1, expected, AT_ONCE_S)
    assert "rank 1 left: ValueError: a bug of this rank alone" in said.error


@pytest.mark.parametrize("guilty", [0, 1])
def test_dead_peer_is_named_at_once(gpus: Gpus, expected: dict[str, list[int]], guilty: int) -> None:
    answers = gpus.of("dies", guilty)
    check(gpus, answers[1 - guilty], guilty, expected, AT_ONCE_S)
    assert isinstance(answers[guilty], Dead)


def test_device_failure_during_replay_names_the_failed_rank(gpus: Gpus, expected: dict[str, list[int]]) -> None:
    """The peer hears of it from its own device, as an error of its next call; the one at fault keeps its own words."""
    answers = gpus.of("aborts", 1, capture="on", dp_padding="padded")
    check(gpus, answers[0], 1, expected, AT_ONCE_S)
    own = answers[1]
    assert isinstance(own, Lost) and (own.kind, own.rank, own.phase) == ("failed", 1, "replay"), own
    assert "CUDA error" in own.error


def test_step_longer_than_the_watchdog_timeout_continues(gpus: Gpus, expected: dict[str, list[int]]) -> None:
    answers = gpus.of("slow", 1)
    assert gpus.struck is not None and answers == [Dead(0), Dead(0)], answers
    assert gpus.tokens == expected
