"""A few quick checks of what an engine must get right. The tests run them on an engine with a planted bug."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from cluster.engine import Engine, StepResult, build_engine
from cluster.request import Request
from tests.parity.drafts import Texts, correct
from tests.parity.harness import (
    SAMPLING,
    VOCAB,
    RunResult,
    config_of,
    make_request,
    prompts,
    run,
    run_one_by_one,
    scarce_config,
    texts_of,
)
from tests.parity.reference import draft_reference, target_reference
from tests.parity.watch import ReferenceChecker
from tests.support.tiny_checkpoints import draft_folder, target_folder

TARGET_OPTIONS: dict[str, object] = {"vocab_size": VOCAB}


def requests() -> list[Request]:
    """Return sampled and greedy requests. The prompts of `b` and `c` differ from token 8 on, where a page of 4 ends.
    `d` returns log-probabilities.
    """
    base_prompt = prompts()[3]
    diverging_prompt = [*base_prompt[:8], (base_prompt[8] + 1) % VOCAB, *base_prompt[9:14]]
    common_params = {"seed": 5, "max_tokens": 14, "ignore_eos": True}
    return [
        make_request("a", prompts()[2], SAMPLING["0.8"], **common_params),
        make_request("b", base_prompt[:12], SAMPLING["greedy"], **common_params),
        make_request("c", diverging_prompt, SAMPLING["filtered"], **common_params),
        make_request("d", prompts()[5], SAMPLING["greedy"], **common_params, logprobs=2),
        make_request("f", prompts()[7], SAMPLING["0.8"], **common_params),
        make_request("e", prompts()[1], SAMPLING["0.8"], seed=77, max_tokens=9),
    ]


@cache
def plain() -> RunResult:
    """The oracle: plain decoding of `requests`, one by one. It must be called before a bug is planted."""
    return run_one_by_one(
        build_engine(config_of(target_folder(**TARGET_OPTIONS), disable_radix_cache=True)), requests()
    )


@cache
def texts() -> Texts:
    return texts_of(requests(), plain())


def short_requests() -> list[Request]:
    """Return the first three requests with prompts cut to 5, 7 and 9 tokens, which form one group of chunks."""
    return [
        replace(request, prompt_token_ids=request.prompt_token_ids[:length])
        for request, length in zip(requests(), (5, 7, 9), strict=False)
    ]


@cache
def short_plain_completions() -> dict[str, tuple[list[int], str | None, str | int | None]]:
    """The completion of each of `short_requests`, run one by one. It must be called before a bug is planted."""
    engine = build_engine(config_of(target_folder(**TARGET_OPTIONS), disable_radix_cache=True))
    return run_one_by_one(engine, short_requests()).completions


def checked_engine(
    topk: int, num_steps: int, memory: str = "ample", rate: float = 0.8, chunk: int = 13
) -> tuple[Engine, ReferenceChecker]:
    """Build an engine and attach a strict `ReferenceChecker`; return both. The engine's draft has a reduced vocabulary,
    and its trees are corrected towards the texts of plain decoding.
    """
    target = target_folder(**TARGET_OPTIONS)
    draft = draft_folder(target, draft_vocab=17)
    config = config_of(target, draft, topk, num_steps, page_size=4, chunked_prefill_size=chunk)
    engine = build_engine(scarce_config(config, requests()) if memory == "scarce" else config)
    checker = ReferenceChecker(target_reference(target), draft_reference(draft, target), texts(), strict=True)
    checker.attach(engine)
    correct(engine, texts(), rate)
    return engine, checker


def check_decoding(topk: int, num_steps: int, memory: str = "ample") -> None:
    """Check tokens, finish reasons, log-probabilities, KV cells and trees. Then check them again, with prompts that are
    in the prefix cache.
    """
    engine, checker = checked_engine(topk, num_steps, memory)
    for id_suffix in ("", "/again"):
        turn_requests = [replace(request, request_id=request.request_id + id_suffix) for request in requests()]
        result = run(engine, turn_requests, checker, max_steps=400)
        assert {
            name.split("/")[0]: completion for name, completion in result.completions.items()
        } == plain().completions, "tokens differ"
        logprobs = [
            token_logprob.logprob for output in result.outputs[f"d{id_suffix}"] for token_logprob in output.logprobs
        ]
        expected_logprobs = [
            token_logprob.logprob for output in plain().outputs["d"] for token_logprob in output.logprobs
        ]
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-9), "log-probabilities differ"
        assert not checker.errors, checker.errors[0]
    assert result.accept_length > 1.5 or memory == "scarce", "the accept length is too small"


def check_abort() -> None:
    """Abort a request twice in the middle of its prompt, then submit it again: the cells that it left in the cache must
    be right. A chunk has a single row, so the steps under way at the abort cannot fill a page and hide a fault.
    """
    engine, checker = checked_engine(3, 3, chunk=1)
    request = next(request for request in requests() if request.request_id == "f")

    def abort(engine: Engine, step: StepResult) -> None:
        sequence = engine._sequences.get("f/gone")
        if sequence is not None and sequence.committed >= 13:
            engine.abort("f/gone")
        checker(engine, step)

    for _ in range(2):
        aborted_result = run(engine, [replace(request, request_id="f/gone")], abort)
        assert not aborted_result.tokens["f/gone"], "the request was not aborted in the middle of its prompt"
    result = run(engine, [request], checker)
    assert result.completions["f"] == plain().completions["f"], "tokens differ"
    assert result.last["f"].cached_tokens > 0, "no token was found in the prefix cache"
    assert not checker.errors, checker.errors[0]


def check_stop_token() -> None:
    """Check that a stop token in the middle of an accepted path cuts the output after it."""
    engine, _ = checked_engine(1, 5, rate=1.0)
    plain_tokens = plain().tokens["b"]
    stop_index = max(plain_tokens.index(token) for token in plain_tokens[:9])
    params = replace(requests()[1].params, stop_token_ids=(plain_tokens[stop_index],))
    result = run(engine, [replace(requests()[1], params=params)])
    assert result.tokens["b"] == plain_tokens[: stop_index + 1], "the output is not cut after the stop token"


def check_unequal_prompts() -> None:
    """Check the tokens of prompts of unequal lengths that are computed in the same step."""
    target = target_folder(**TARGET_OPTIONS)
    engine = build_engine(config_of(target, page_size=4, chunked_prefill_size=-1, disable_radix_cache=True))
    assert run(engine, short_requests()).completions == short_plain_completions(), "tokens differ"


CHECKS: list[Callable[[], None]] = [
    lambda: check_decoding(3, 3),
    lambda: check_decoding(1, 3),
    check_stop_token,
    check_abort,
    check_unequal_prompts,
    lambda: check_decoding(3, 3, "scarce"),
]


def first_failure() -> str | None:
    """Run the checks in order; return the error of the first that fails, or None if all pass."""
    for check in CHECKS:
        try:
            check()
        except (AssertionError, ValueError, RuntimeError, IndexError, KeyError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    return None
