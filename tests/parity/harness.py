"""Runs of tiny engines, and plain decoding as their oracle (law 1). `KV_CACHE_DTYPE=fp8_e4m3` runs them all on caches
in FP8, where they do not name another.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from cluster.config import EngineConfig
from cluster.config.tree_shape import tree_shape
from cluster.engine import Engine, StepResult, build_engine
from cluster.engine.build import engine_of, prepare_single_rank
from cluster.request import Request, RequestParams, SequenceOutput
from tests.parity.drafts import OracleDraft, Texts, correct
from tests.tiny import draft_folder, target_folder

VOCAB = 24
"""Small, so that a random draft is right now and then."""
OVERLAP = int(os.environ.get("OVERLAP", "0"))  # steps that have begun when the results of one are read
CACHE = os.environ.get("KV_CACHE_DTYPE", "auto")
GREEDY = RequestParams(temperature=0.0)
SAMPLING = {
    "greedy": GREEDY,
    "0.8": RequestParams(temperature=0.8),
    "filtered": RequestParams(temperature=1.2, top_p=0.9, top_k=12, min_p=0.02),
}


@dataclass
class Run:
    """What an engine gave: outputs joined per request, and every accept length."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, SequenceOutput] = field(default_factory=dict)
    outputs: dict[str, list[SequenceOutput]] = field(default_factory=dict)
    accept_lens: list[int] = field(default_factory=list)
    retracted: int = 0
    steps: int = 0

    @property
    def accept_length(self) -> float:
        return sum(self.accept_lens) / max(1, len(self.accept_lens))

    @property
    def ended(self) -> dict[str, tuple[list[int], str | None, str | int | None]]:
        """Tokens and the reason for the end: what must not depend on speculation."""
        return {i: (self.tokens[i], o.finish_reason, o.stop_reason) for i, o in self.last.items()}


def tiny_pair(num_aux: int = 3, layers: int = 1) -> tuple[str, str]:
    """Folders of the random target of all parity tests, and of a random draft for it."""
    target = target_folder(vocab_size=VOCAB)
    return target, draft_folder(target, num_aux=num_aux, layers=layers)


def config_of(
    target: str, draft: str | None = None, topk: int = 1, num_steps: int = 3, **settings: object
) -> EngineConfig:
    """A float64 CPU engine of at most 8 requests; speculative when a draft is given. Prompt rows beside decoding
    requests are a number, so that a test takes the same steps every time. Steps with a grammar have two forced nodes or
    more for each request.
    """
    given: dict[str, object] = {
        "model_path": target,
        "dtype": "float64",
        "device": "cpu",
        "num_threads": 1,
        "max_running_requests": 8,
        "max_total_tokens": 2048,
        "page_size": 4,
        "kv_cache_dtype": CACHE,
        "mixed_prefill_size": 24,
        "speculative_forced_rows": 16,
        "capture": "off",  # drafts of tests look at what they draft
    }
    if draft is not None:
        given |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": draft,
            "speculative_eagle_topk": topk,
            "speculative_num_steps": num_steps,
        }
    return EngineConfig.from_kwargs(given | settings)


def scarce(config: EngineConfig, requests: Sequence[Request], more: int = 1) -> EngineConfig:
    """The same with `more` pages than the longest request needs, so that others retract."""
    longest = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests) + tree_shape(config).window
    pages = -(-longest // config.page_size) + more
    return config.model_copy(update={"max_total_tokens": pages * config.page_size})


def speculative(config: EngineConfig, kind: str = "model", truth: Texts | None = None, rate: float = 0.7) -> Engine:
    """An engine with a draft of `kind`: the `model` alone, `corrected` towards the truth, or the `oracle` alone."""
    if kind == "oracle":
        shape = tree_shape(config)
        oracle = OracleDraft(shape, truth or {}, rate, VOCAB, 32)
        engine = engine_of(prepare_single_rank(config), oracle)
        oracle.tie(engine)
        return engine
    engine = build_engine(config)
    if kind == "corrected":
        correct(engine, truth or {}, rate)
    return engine


def run(
    engine: Engine,
    requests: Sequence[Request],
    after_step: Callable[[Engine, StepResult], None] | None = None,
    limit: int = 2000,
    later: Sequence[Request] = (),
) -> Run:
    """Run the requests together to their end, checking the pages after every step; `after_step` submits `later`."""
    result = Run()
    for request in [*requests, *later]:
        result.tokens[request.request_id] = []
        result.outputs[request.request_id] = []
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        step = engine.step()
        engine.check_pages()
        for output in step.outputs:
            result.tokens[output.request_id] += output.token_ids
            result.outputs[output.request_id].append(output)
            result.last[output.request_id] = output
        result.accept_lens += step.stats.accept_lens
        result.retracted += step.stats.retracted
        result.steps += 1
        assert result.steps < limit, "the engine does not come to an end"
        if after_step is not None:
            after_step(engine, step)
    status = engine.status()
    assert status.pages_used == 0, "pages stay in use after the last request"
    assert status.pages_free + status.pages_cached == engine._parts.cache.total_pages
    return result


def run_alone(engine: Engine, requests: Sequence[Request]) -> Run:
    """Run the requests one after the other, each alone."""
    whole = Run()
    for one in requests:
        alone = run(engine, [one])
        whole.tokens |= alone.tokens
        whole.last |= alone.last
        whole.outputs |= alone.outputs
    return whole


def texts_of(requests: Sequence[Request], result: Run) -> Texts:
    """The whole texts of a run, prompts included."""
    return {one.request_id: [*one.prompt_token_ids, *result.tokens[one.request_id]] for one in requests}


def request(name: str, prompt: Sequence[int], params: RequestParams, **changes: object) -> Request:
    """A request of `prompt`; `changes` are sampling parameters."""
    return Request(name, tuple(prompt), replace(params, **changes))  # type: ignore[arg-type]


@cache
def prompts(count: int = 8, longest: int = 66, vocab: int = VOCAB) -> tuple[tuple[int, ...], ...]:
    """Prompts of mixed length, the first the longest; some share a prefix."""
    generator = torch.Generator().manual_seed(11)
    lengths = [longest, 1, 17, 30, 5, 21, 12, 33][:count]
    made = [tuple(torch.randint(2, vocab, (n,), generator=generator).tolist()) for n in lengths]
    if count > 5:
        made[5] = made[3][:17] + made[5][17:]
    return tuple(made)


def grid_requests(sampling: str, batch: int) -> list[Request]:
    """`batch` requests of 12 to 18 new tokens; three of them may end early with EOS."""
    return [
        request(
            f"r{i}", prompt, SAMPLING[sampling], seed=3000 + i, max_tokens=18 - i % 4 * 2, ignore_eos=i not in (3, 6, 7)
        )
        for i, prompt in enumerate(prompts()[:batch])
    ]


@cache
def plain_run(sampling: str, kept: str = CACHE) -> Run:
    """Plain decoding of the grid's requests, each alone, without prefix reuse, on a cache `kept` so: the oracle."""
    config = config_of(tiny_pair()[0], disable_radix_cache=True, kv_cache_dtype=kept)
    return run_alone(build_engine(config), grid_requests(sampling, 8))


@cache
def truth(sampling: str, kept: str = CACHE) -> Texts:
    """The grid's whole texts, prompts included."""
    return texts_of(grid_requests(sampling, 8), plain_run(sampling, kept))
