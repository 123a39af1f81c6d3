"""With the host one step ahead of the device, tokens stay the same, even if requests end or are aborted or retracted
while a step is under way.
"""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from cluster.batch import StepInput
from cluster.engine import Engine, StepResult
from tests.parity.harness import (
    config_of,
    grid_requests,
    plain_run,
    plain_texts,
    run,
    scarce_config,
    speculative_engine,
    tiny_pair,
)
from tests.support.late_device import LateOutput, LatePrograms, delay
from tests.support.pairwise import covering


def overlapped_engine(topk: int, memory: str = "ample", kind: str = "corrected", rate: float = 0.7) -> Engine:
    requests = grid_requests("0.8", 8)
    config = config_of(*tiny_pair(), topk, 3, chunked_prefill_size=9)
    engine = speculative_engine(
        scarce_config(config, requests, 6) if memory == "scarce" else config, kind, plain_texts("0.8"), rate
    )
    return engine if isinstance(engine._parts.lockstep.programs, LatePrograms) else delay(engine)


@pytest.mark.parametrize(
    ("topk", "memory", "kind"), covering([(1, 3), ("ample", "scarce"), ("model", "corrected", "oracle")])
)
def test_overlapped_host_gets_the_tokens_of_plain_decoding(topk: int, memory: str, kind: str) -> None:
    engine = overlapped_engine(topk, memory, kind)
    requests = grid_requests("0.8", 8)
    first_result = run(engine, requests)
    second_result = run(engine, [replace(request, request_id=f"{request.request_id}/2") for request in requests])
    assert (
        {n.split("/")[0]: e for n, e in second_result.completions.items()}
        == first_result.completions
        == plain_run("0.8").completions
    )
    assert bool(first_result.retracted + second_result.retracted) == (memory == "scarce")
    assert sum(output.cached_tokens for output in second_result.last.values()) > 0 or memory == "scarce"


def test_next_step_starts_before_the_previous_output_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host begins (`b`) each step before it reads (`r`) the one before. It never waits for the step that it has
    just begun, until no work is left.
    """
    engine, events = overlapped_engine(1), ""
    original_run, original_read = LatePrograms.run, LateOutput.read

    def recording_run(self: LatePrograms, step_input: StepInput, *rest: Any) -> LateOutput:
        nonlocal events
        events += "b"
        return original_run(self, step_input, *rest)

    def recording_read(self: LateOutput):  # type: ignore[no-untyped-def]
        nonlocal events
        events += "r"
        return original_read(self)

    monkeypatch.setattr(LatePrograms, "run", recording_run)
    monkeypatch.setattr(LateOutput, "read", recording_read)
    run(engine, grid_requests("0.8", 1))
    assert events == "b" + "br" * (events.count("b") - 1) + "r" and len(events) > 10


def test_request_ending_in_the_step_under_way_is_not_scheduled_again() -> None:
    """The request has one token left, and every step gives at least one. So the engine must not run another step for
    it: the target computes only the prompt's rows.
    """
    engine, rows = overlapped_engine(1), 0
    request = replace(grid_requests("0.8", 1)[0], params=replace(grid_requests("0.8", 1)[0].params, max_tokens=1))

    def count_rows(_: Engine, step: StepResult) -> None:
        nonlocal rows
        rows += step.stats.target_rows

    result = run(engine, [request], count_rows)
    assert result.tokens[request.request_id] == plain_run("0.8").tokens[request.request_id][:1]
    assert rows == len(request.prompt_token_ids)


def check_random_aborts(seed: int, count: int) -> None:
    """Submit and abort requests at random. The requests that end must have the tokens of plain decoding, and no page
    may be lost.
    """
    random, requests_by_id = Random(seed), {request.request_id: request for request in grid_requests("0.8", 8)}
    plain = plain_run("0.8").completions
    engine = overlapped_engine(random.choice([1, 3]), random.choice(["ample", "scarce"]), rate=random.random())
    active_tokens: dict[str, list[int]] = {}
    submitted_count = finished_count = 0
    while submitted_count < count or engine.has_work:
        while submitted_count < count and random.random() < 0.3:
            template = requests_by_id[random.choice(sorted(requests_by_id))]
            engine.submit(replace(template, request_id=f"{template.request_id}/{submitted_count}"))
            active_tokens[f"{template.request_id}/{submitted_count}"] = []
            submitted_count += 1
        for name in [name for name in active_tokens if random.random() < 0.03]:
            engine.abort(name)
            del active_tokens[name]
        step = engine.step()
        engine.check_pages()
        for output in step.outputs:
            assert output.request_id in active_tokens, "an aborted request has an output"
            active_tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                tokens = active_tokens.pop(output.request_id)
                assert (tokens, output.finish_reason, output.stop_reason) == plain[output.request_id.split("/")[0]]
                finished_count += 1
    assert engine.status().pages_used == 0
    assert count / 4 < finished_count < count


@pytest.mark.parametrize("seed", range(3))
def test_random_aborts_do_not_change_other_requests(seed: int) -> None:
    check_random_aborts(seed, 25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10, 18))
def test_many_random_aborts_do_not_change_other_requests(seed: int) -> None:
    check_random_aborts(seed, 130)
