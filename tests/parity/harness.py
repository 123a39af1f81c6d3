"""Helpers that run tiny engines, and plain decoding as the oracle of these runs (law 1). With the environment variable
`KV_CACHE_DTYPE=fp8_e4m3`, every engine has a KV cache in FP8, unless its test sets another `kv_cache_dtype`.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.config.tree_shape import tree_shape
from cluster.engine import Engine, StepResult, build_engine
from cluster.engine.build import engine_of, prepare_single_rank
from cluster.request import Request, RequestParams, SequenceOutput
from tests.parity.drafts import OracleDraft, Texts, correct
from tests.support.tiny_checkpoints import draft_folder, target_folder

VOCAB = 24
"""Vocabulary size. It is small, so that a random draft sometimes proposes the right token."""
OVERLAP = int(os.environ.get("OVERLAP", "0"))  # how many steps the host is ahead when it reads the results of a step
KV_CACHE_DTYPE = os.environ.get("KV_CACHE_DTYPE", "auto")
GREEDY = RequestParams(temperature=0.0)
SAMPLING = {
    "greedy": GREEDY,
    "0.8": RequestParams(temperature=0.8),
    "filtered": RequestParams(temperature=1.2, top_p=0.9, top_k=12, min_p=0.02),
}


@dataclass
class RunResult:
    """The result of a run. By request id: all tokens, the last output, and all outputs. For the whole run: every accept
    length, and the numbers of retractions and of steps.
    """

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
    def completions(self) -> dict[str, tuple[list[int], str | None, str | int | None]]:
        """By request id: tokens, finish reason and stop reason. None of them may depend on speculation."""
        return {i: (self.tokens[i], o.finish_reason, o.stop_reason) for i, o in self.last.items()}


def tiny_pair(num_aux: int = 3, layers: int = 1) -> tuple[str, str]:
    """Return two folders: the random target of all parity tests, and a random draft for it."""
    target = target_folder(vocab_size=VOCAB)
    return target, draft_folder(target, num_aux=num_aux, layers=layers)


def config_of(
    target: str, draft: str | None = None, topk: int = 1, num_steps: int = 3, **settings: object
) -> EngineConfig:
    """Return the config of a float64 CPU engine that runs at most 8 requests. With a `draft` the engine speculates.

    `mixed_prefill_size` is a fixed number, so that a test takes the same steps every time. `speculative_forced_rows`
    gives each request at least two forced nodes in steps with a grammar.
    """
    config_kwargs: dict[str, object] = {
        "model_path": target,
        "dtype": "float64",
        "device": "cpu",
        "num_threads": 1,
        "max_running_requests": 8,
        "max_total_tokens": 2048,
        "page_size": 4,
        "kv_cache_dtype": KV_CACHE_DTYPE,
        "mixed_prefill_size": 24,
        "speculative_forced_rows": 16,
        "capture": "off",  # the drafts of the tests read the values of the trees that they draft
        "speculative_mode": "fixed",  # a test takes the same steps every time
    }
    if draft is not None:
        config_kwargs |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": draft,
            "speculative_eagle_topk": topk,
            "speculative_num_steps": num_steps,
        }
    return EngineConfig.from_kwargs(config_kwargs | settings)


def scarce_config(config: EngineConfig, requests: Sequence[Request], extra_pages: int = 1) -> EngineConfig:
    """Return `config` with few pages: those of the longest request and `extra_pages`, so that others are retracted."""
    max_length = (
        max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests)
        + ResolvedSettings.from_settings(config).shape.window
    )
    page_count = -(-max_length // config.page_size) + extra_pages
    return config.model_copy(update={"max_total_tokens": page_count * config.page_size})


def speculative_engine(
    config: EngineConfig, draft_kind: str = "model", true_texts: Texts | None = None, rate: float = 0.7
) -> Engine:
    """Build an engine with a draft of `draft_kind`. `model`: the draft model. `corrected`: the draft model, whose trees
    are corrected towards `true_texts` (`CorrectedDraft`). `oracle`: random trees with true tokens (`OracleDraft`).
    """
    if draft_kind == "oracle":
        shape = tree_shape(config)
        oracle = OracleDraft(shape, true_texts or {}, rate, VOCAB, 32)
        engine = engine_of(prepare_single_rank(config), oracle)
        oracle.attach(engine)
        return engine
    engine = build_engine(config)
    if draft_kind == "corrected":
        correct(engine, true_texts or {}, rate)
    return engine


def run(
    engine: Engine,
    requests: Sequence[Request],
    after_step: Callable[[Engine, StepResult], None] | None = None,
    max_steps: int = 2000,
    later_requests: Sequence[Request] = (),
) -> RunResult:
    """Run the requests together to their end, and check the pages after every step. `after_step` is called after each
    step; it has to submit `later_requests`.
    """
    result = RunResult()
    for request in [*requests, *later_requests]:
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
        assert result.steps < max_steps, "the engine still has work after the maximum number of steps"
        if after_step is not None:
            after_step(engine, step)
    status = engine.status()
    assert status.pages_used == 0, "pages are still in use after the last request has ended"
    assert status.pages_free + status.pages_cached == engine._parts.cache.total_pages
    return result


def run_one_by_one(engine: Engine, requests: Sequence[Request]) -> RunResult:
    """Run each request by itself, one after the other."""
    result = RunResult()
    for request in requests:
        single_result = run(engine, [request])
        result.tokens |= single_result.tokens
        result.last |= single_result.last
        result.outputs |= single_result.outputs
    return result


def texts_of(requests: Sequence[Request], result: RunResult) -> Texts:
    """Return the full text of each request: its prompt tokens, then its output tokens."""
    return {request.request_id: [*request.prompt_token_ids, *result.tokens[request.request_id]] for request in requests}


def make_request(name: str, prompt: Sequence[int], params: RequestParams, **changes: object) -> Request:
    """Make a request with the id `name`. `changes` replace sampling parameters of `params`."""
    return Request(name, tuple(prompt), replace(params, **changes))  # type: ignore[arg-type]


@cache
def prompts(count: int = 8, longest: int = 66, vocab: int = VOCAB) -> tuple[tuple[int, ...], ...]:
    """Return prompts of different lengths. The first is the longest; two of them share a prefix of 17 tokens."""
    generator = torch.Generator().manual_seed(11)
    lengths = [longest, 1, 17, 30, 5, 21, 12, 33][:count]
    token_lists = [tuple(torch.randint(2, vocab, (n,), generator=generator).tolist()) for n in lengths]
    if count > 5:
        token_lists[5] = token_lists[3][:17] + token_lists[5][17:]
    return tuple(token_lists)


def grid_requests(sampling: str, batch: int) -> list[Request]:
    """Return `batch` requests for 12 to 18 new tokens. Requests 3, 6 and 7 may end early with EOS."""
    return [
        make_request(
            f"r{i}", prompt, SAMPLING[sampling], seed=3000 + i, max_tokens=18 - i % 4 * 2, ignore_eos=i not in (3, 6, 7)
        )
        for i, prompt in enumerate(prompts()[:batch])
    ]


@cache
def plain_run(sampling: str, kv_cache_dtype: str = KV_CACHE_DTYPE) -> RunResult:
    """The oracle: plain decoding of the grid's requests, one by one, without prefix reuse."""
    config = config_of(tiny_pair()[0], disable_radix_cache=True, kv_cache_dtype=kv_cache_dtype)
    return run_one_by_one(build_engine(config), grid_requests(sampling, 8))


@cache
def plain_texts(sampling: str, kv_cache_dtype: str = KV_CACHE_DTYPE) -> Texts:
    """The full texts (prompts included) that plain decoding gives for the grid's requests."""
    return texts_of(grid_requests(sampling, 8), plain_run(sampling, kv_cache_dtype))
