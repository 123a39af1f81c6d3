"""The host a step ahead of the device: the same tokens, whatever ends, is aborted or retracted meanwhile."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from cluster.batch import StepInput
from cluster.engine import Engine, StepResult
from tests.late import LateOutput, LatePrograms, delay
from tests.pairwise import covering
from tests.parity.harness import config_of, grid_requests, plain_run, run, scarce, speculative, tiny_pair, truth


def overlapped(topk: int, memory: str = "ample", kind: str = "corrected", rate: float = 0.7) -> Engine:
    requests = grid_requests("0.8", 8)
    config = config_of(*tiny_pair(), topk, 3, chunked_prefill_size=9)
    engine = speculative(scarce(config, requests, 6) if memory == "scarce" else config, kind, truth("0.8"), rate)
    return engine if isinstance(engine._parts.lockstep.programs, LatePrograms) else delay(engine)


@pytest.mark.parametrize(
    ("topk", "memory", "kind"), covering([(1, 3), ("ample", "scarce"), ("model", "corrected", "oracle")])
)
def test_overlapped_host_gets_the_tokens_of_plain_decoding(topk: int, memory: str, kind: str) -> None:
    engine = overlapped(topk, memory, kind)
    requests = grid_requests("0.8", 8)
    first = run(engine, requests)
    again = run(engine, [replace(one, request_id=f"{one.request_id}/2") for one in requests])
    assert {n.split("/")[0]: e for n, e in again.ended.items()} == first.ended == plain_run("0.8").ended
    assert bool(first.retracted + again.retracted) == (memory == "scarce")
    assert sum(output.cached_tokens for output in again.last.values()) > 0 or memory == "scarce"


def test_next_step_starts_before_the_previous_output_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun and read in turns: the host never waits for the step that it has just begun, until nothing is left."""
    engine, seen = overlapped(1), ""
    begin, read = LatePrograms.run, LateOutput.read

    def began(self: LatePrograms, order: StepInput, *rest: Any) -> LateOutput:
        nonlocal seen
        seen += "b"
        return begin(self, order, *rest)

    def landed(self: LateOutput):  # type: ignore[no-untyped-def]
        nonlocal seen
        seen += "r"
        return read(self)

    monkeypatch.setattr(LatePrograms, "run", began)
    monkeypatch.setattr(LateOutput, "read", landed)
    run(engine, grid_requests("0.8", 1))
    assert seen == "b" + "br" * (seen.count("b") - 1) + "r" and len(seen) > 10


def test_request_ending_in_the_step_under_way_is_not_scheduled_again() -> None:
    """One token is left, and every step gives one: no step is run in vain."""
    engine, rows = overlapped(1), 0
    one = replace(grid_requests("0.8", 1)[0], params=replace(grid_requests("0.8", 1)[0].params, max_tokens=1))

    def count(_: Engine, step: StepResult) -> None:
        nonlocal rows
        rows += step.stats.target_rows

    result = run(engine, [one], count)
    assert result.tokens[one.request_id] == plain_run("0.8").tokens[one.request_id][:1]
    assert rows == len(one.prompt_token_ids)


def aborts(seed: int, count: int) -> None:
    """Requests come and are aborted at random; what is left has plain decoding's tokens, and no page is lost."""
    random, known = Random(seed), {one.request_id: one for one in grid_requests("0.8", 8)}
    plain = plain_run("0.8").ended
    engine = overlapped(random.choice([1, 3]), random.choice(["ample", "scarce"]), rate=random.random())
    alive: dict[str, list[int]] = {}
    made = ended = 0
    while made < count or engine.has_work:
        while made < count and random.random() < 0.3:
            base = known[random.choice(sorted(known))]
            engine.submit(replace(base, request_id=f"{base.request_id}/{made}"))
            alive[f"{base.request_id}/{made}"] = []
            made += 1
        for name in [name for name in alive if random.random() < 0.03]:
            engine.abort(name)
            del alive[name]
        step = engine.step()
        engine.check_pages()
        for output in step.outputs:
            assert output.request_id in alive, "an aborted request says no more"
            alive[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                tokens = alive.pop(output.request_id)
                assert (tokens, output.finish_reason, output.stop_reason) == plain[output.request_id.split("/")[0]]
                ended += 1
    assert engine.status().pages_used == 0
    assert count / 4 < ended < count


@pytest.mark.parametrize("seed", range(3))
def test_random_aborts_do_not_change_other_requests(seed: int) -> None:
    aborts(seed, 25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 18))
def test_many_random_aborts_do_not_change_other_requests(seed: int) -> None:
    aborts(seed, 130)
