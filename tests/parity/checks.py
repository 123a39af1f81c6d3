"""What an engine must get right, as a few quick checks that can be run on an engine with a planted bug."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from cluster.engine import Engine, StepResult, build_engine
from cluster.request import Request
from tests.parity.drafts import Texts, correct
from tests.parity.harness import SAMPLING, VOCAB, Run, config_of, prompts, request, run, run_alone, scarce, texts_of
from tests.parity.reference import draft_reference, target_reference
from tests.parity.watch import Watch
from tests.tiny import draft_folder, target_folder

TARGET_OPTIONS: dict[str, object] = {"vocab_size": VOCAB}


def requests() -> list[Request]:
    """Sampled and greedy ones; `b` and `c` part ways just where a page of 4 ends; `d` stops inside a text."""
    base = prompts()[3]
    other = [*base[:8], (base[8] + 1) % VOCAB, *base[9:14]]
    common = {"seed": 5, "max_tokens": 14, "ignore_eos": True}
    return [
        request("a", prompts()[2], SAMPLING["0.8"], **common),
        request("b", base[:12], SAMPLING["greedy"], **common),
        request("c", other, SAMPLING["filtered"], **common),
        request("d", prompts()[5], SAMPLING["greedy"], **common, logprobs=2),
        request("f", prompts()[7], SAMPLING["0.8"], **common),
        request("e", prompts()[1], SAMPLING["0.8"], seed=77, max_tokens=9),
    ]


@cache
def plain() -> Run:
    """Plain decoding without any planted bug."""
    return run_alone(build_engine(config_of(target_folder(**TARGET_OPTIONS), disable_radix_cache=True)), requests())


@cache
def texts() -> Texts:
    return texts_of(requests(), plain())


def short() -> list[Request]:
    """The first ones with prompts of unequal lengths, which make one group of chunks."""
    return [
        replace(one, prompt_token_ids=one.prompt_token_ids[:n]) for one, n in zip(requests(), (5, 7, 9), strict=False)
    ]


@cache
def short_alone() -> dict[str, tuple[list[int], str | None, str | int | None]]:
    """What each of them gives alone, without any planted bug."""
    engine = build_engine(config_of(target_folder(**TARGET_OPTIONS), disable_radix_cache=True))
    return run_alone(engine, short()).ended


def engine_of(
    topk: int, num_steps: int, memory: str = "ample", rate: float = 0.8, chunk: int = 13
) -> tuple[Engine, Watch]:
    """An engine whose draft has a reduced vocabulary and is corrected towards the truth, and its watch."""
    target = target_folder(**TARGET_OPTIONS)
    draft = draft_folder(target, draft_vocab=17)
    config = config_of(target, draft, topk, num_steps, page_size=4, chunked_prefill_size=chunk)
    engine = build_engine(scarce(config, requests()) if memory == "scarce" else config)
    watch = Watch(target_reference(target), draft_reference(draft, target), texts(), strict=True)
    watch.attach(engine)
    correct(engine, texts(), rate)
    return engine, watch


def decoding(topk: int, num_steps: int, memory: str = "ample") -> None:
    """Tokens, ends, log-probabilities, memory and trees; then again from cached pages."""
    engine, watch = engine_of(topk, num_steps, memory)
    for turn in ("", "/again"):
        asked = [replace(one, request_id=one.request_id + turn) for one in requests()]
        result = run(engine, asked, watch, limit=400)
        assert {name.split("/")[0]: ended for name, ended in result.ended.items()} == plain().ended, "tokens"
        lines = [line.logprob for output in result.outputs[f"d{turn}"] for line in output.logprobs]
        wanted = [line.logprob for output in plain().outputs["d"] for line in output.logprobs]
        assert lines == pytest.approx(wanted, abs=1e-9), "log-probabilities"
        assert not watch.errors, watch.errors[0]
    assert result.accept_length > 1.5 or memory == "scarce", "accept length"


def aborting() -> None:
    """A request that goes in the middle of its prompt, and comes again: what it left in the cache is right. Steps that
    are under way when it goes have fewer rows than a page, so that they make up for nothing.
    """
    engine, watch = engine_of(3, 3, chunk=1)
    one = next(one for one in requests() if one.request_id == "f")

    def abort(engine: Engine, step: StepResult) -> None:
        sequence = engine._sequences.get("f/gone")
        if sequence is not None and sequence.committed >= 13:
            engine.abort("f/gone")
        watch(engine, step)

    for _ in range(2):
        gone = run(engine, [replace(one, request_id="f/gone")], abort)
        assert not gone.tokens["f/gone"], "it went in the middle of its prompt"
    result = run(engine, [one], watch)
    assert result.ended["f"] == plain().ended["f"], "tokens"
    assert result.last["f"].cached_tokens > 0, "cache"
    assert not watch.errors, watch.errors[0]


def stopping() -> None:
    """A stop token inside an accepted run."""
    engine, _ = engine_of(1, 5, rate=1.0)
    text = plain().tokens["b"]
    at = max(text.index(token) for token in text[:9])
    params = replace(requests()[1].params, stop_token_ids=(text[at],))
    result = run(engine, [replace(requests()[1], params=params)])
    assert result.tokens["b"] == text[: at + 1], "the cut"


def meeting() -> None:
    """Prompts of unequal lengths that begin in one step."""
    target = target_folder(**TARGET_OPTIONS)
    engine = build_engine(config_of(target, page_size=4, chunked_prefill_size=-1, disable_radix_cache=True))
    assert run(engine, short()).ended == short_alone(), "tokens"


CHECKS: list[Callable[[], None]] = [
    lambda: decoding(3, 3),
    lambda: decoding(1, 3),
    stopping,
    aborting,
    meeting,
    lambda: decoding(3, 3, "scarce"),
]


def caught() -> str | None:
    """What the first failing check said; None when all pass."""
    for check in CHECKS:
        try:
            check()
        except (AssertionError, ValueError, RuntimeError, IndexError, KeyError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    return None
