"""The answers of `transformers`, of this engine without a server, and of `aerie serve` over REST.

Each `by_..` function is a stage that runs in a process of its own, so that peak memory is measured separately. Results
are JSON-ready.
"""

import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real.kept import ResultCache
from benchmarks.real.prompts import Prompt
from cluster.bench.processes import memory_usage
from cluster.bench.server import ServerProcess
from cluster.bench.streams import HOST
from cluster.config import EngineConfig
from cluster.engine import Engine, build_engine
from cluster.offline.stepping import complete
from cluster.request import Request, RequestParams
from cluster.tools.client import Client

BATCHES = (1, 16)
MODEL_ID = "real"
NO_DRAFT = ("speculative_algorithm=null", "tp_size=1", "attn_dp_size=1")
QUEUE_TIMEOUT_S = 900.0  # most seconds that a request may wait in the server's queue
KIB = 1024
MAX_PADDED_TOKENS = 256  # longer prompts run as batches of one, so that no shorter prompt is padded to their length

Tokens = list[list[int]]


def tokenizer_of(folder: str) -> Any:
    """Return the folder's tokenizer, loaded by `transformers`."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def log_progress(text: str) -> None:
    """Print a stage's progress to stderr; its result goes to stdout."""
    print(f"real: {text}", file=sys.stderr, flush=True)


def peak_mib() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB


def by_transformers(
    folder: str, prompts: Sequence[Prompt], new_tokens: int, result_cache: ResultCache
) -> dict[str, Any]:
    """Return greedy answers of `transformers` in float32, one prompt at a time and in batches of 16; and its peak
    memory.
    """
    tokenizer = tokenizer_of(folder)
    ids = [prompt.token_ids(tokenizer) for prompt in prompts]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    greedy = {str(batch): _generate(model, ids, new_tokens, batch, result_cache) for batch in BATCHES}
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in greedy["1"]]
    return {"prompts": ids, "greedy": greedy, "texts": texts, "peak_mib": peak_mib()}


def _generate(model: Any, prompts: Tokens, new_tokens: int, batch: int, result_cache: ResultCache) -> Tokens:
    """Return the tokens after each prompt, up to its end-of-text token or `new_tokens`. Prompts of a batch are padded
    on the left, so prompts of similar length share a batch; one over `MAX_PADDED_TOKENS` tokens has its own batch.
    """
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    padded_indices = [index for index in by_length if len(prompts[index]) <= MAX_PADDED_TOKENS]
    batches = [padded_indices[start : start + batch] for start in range(0, len(padded_indices), batch)]
    batches += [[index] for index in by_length if index not in padded_indices]
    answers: dict[int, list[int]] = {}
    for number, batch_indices in enumerate(batches):
        log_progress(f"transformers, batch {batch}: {number + 1} of {len(batches)}")
        generated = result_cache.get_or_make(
            f"{batch}, {batch_indices}",
            partial(_generate_batch, model, [prompts[index] for index in batch_indices], new_tokens),
        )
        answers |= zip(batch_indices, generated, strict=True)
    return [answers[index] for index in range(len(prompts))]


@torch.inference_mode()
def _generate_batch(model: Any, prompts: Tokens, new_tokens: int) -> Tokens:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sequences = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return [cut_at_end_token(row, end_token_ids(model)) for row in sequences[:, width:].tolist()]


def end_token_ids(model: Any) -> list[int]:
    """Return the ids of the tokens that end an answer of a `transformers` model."""
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


def cut_at_end_token(tokens: list[int], end_ids: Sequence[int]) -> list[int]:
    """Return an answer without its end token and without the padding after it."""
    return tokens[: next((index for index, token in enumerate(tokens) if token in end_ids), len(tokens))]


def by_engine(folder: str, prompts: Sequence[Prompt], new_tokens: int, result_cache: ResultCache) -> dict[str, Any]:
    """Return answers of this engine in float32 and its peak memory. Greedy answers run one request at a time and 16 at
    once; answers sampled at temperature 1 run 16 at once.
    """
    tokenizer = tokenizer_of(folder)
    ids = [prompt.token_ids(tokenizer) for prompt in prompts]
    engine = make_engine(folder, "float32", max(BATCHES))

    def answer_all(temperature: float, batch: int) -> Tokens:
        generated: Tokens = []
        for start in range(0, len(ids), batch):
            log_progress(f"engine, temperature {temperature:g}, batch {batch}: {start} of {len(ids)}")
            seeds = range(start, min(start + batch, len(ids)))
            requests = [
                Request(str(seed), tuple(ids[seed]), sampling_params(temperature, new_tokens, seed)) for seed in seeds
            ]
            generated += result_cache.get_or_make(
                f"{temperature}, {batch}, {start}", partial(complete, engine, requests)
            )
        return [cut_at_end_token(tokens, engine.info().eos_token_ids) for tokens in generated]

    greedy = {str(batch): answer_all(0.0, batch) for batch in BATCHES}
    sampled = answer_all(1.0, max(BATCHES))
    return {"prompts": ids, "greedy": greedy, "sampled": sampled, "peak_mib": peak_mib()}


def make_engine(folder: str, dtype: str, requests: int, reuse: bool = True) -> Engine:
    """Return an engine for `requests` running requests, with as many threads as torch has (`OMP_NUM_THREADS`). Without
    `reuse`, it has no prefix cache. All other settings are the defaults.
    """
    settings: dict[str, Any] = {"model_path": folder, "dtype": dtype, "max_running_requests": requests}
    settings["num_threads"] = torch.get_num_threads()
    return build_engine(EngineConfig.from_kwargs(settings | {"disable_radix_cache": not reuse}))


def sampling_params(temperature: float, new_tokens: int, seed: int) -> RequestParams:
    """Return the sampling parameters of a request."""
    return RequestParams(temperature=temperature, seed=seed, max_tokens=new_tokens)


def by_server(folder: str, prompts: Sequence[Prompt], new_tokens: int) -> dict[str, Any]:
    """Return streamed answers of `aerie serve` in float32, 16 at once, greedy and at temperature 1: tokens, and the
    joined text of all events. Chats go to /v1/chat/completions. Memory is the sum over all processes of the server.
    """
    queue_setting = f"max_queue_wait_s={QUEUE_TIMEOUT_S}"  # so that no request is refused, even on a busy machine
    settings = [*NO_DRAFT, f"model_path={folder}", f"model_id={MODEL_ID}", "dtype=float32", queue_setting]
    started_at = time.monotonic()
    with ServerProcess(settings) as server, ThreadPoolExecutor(max(BATCHES)) as clients:
        ready_s = time.monotonic() - started_at
        result: dict[str, Any] = {}
        for temperature, name in ((0.0, "greedy"), (1.0, "sampled")):
            log_progress(f"server: {name}")
            bodies = [request_body(prompt, new_tokens, temperature, seed) for seed, prompt in enumerate(prompts)]
            answers = list(clients.map(lambda body: stream_answer(server.port, *body), bodies))
            result[name] = [tokens for tokens, _ in answers]
            result[f"{name}_texts"] = [text for _, text in answers]
        memory = memory_usage(server.processes())
    return result | {"ready_s": ready_s, "processes": memory.processes, "proportional_mib": memory.proportional_mib}


def request_body(prompt: Prompt, new_tokens: int, temperature: float, seed: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the JSON body of a streamed request."""
    body = {"model": MODEL_ID, "max_tokens": new_tokens, "temperature": temperature, "seed": seed, "stream": True}
    body |= {"return_token_ids": True}
    if prompt.messages:
        return "/v1/chat/completions", body | {"messages": prompt.chat}
    return "/v1/completions", body | {"prompt": prompt.text}


def stream_answer(port: int, path: str, body: dict[str, Any]) -> tuple[list[int], str]:
    """Return the token ids and the joined text of a streamed answer, without the token that ended it.

    Raises:
        NoAnswerError: the server answered with an error.
    """
    tokens, text, finish_reason = list[int](), "", ""
    for event in Client(f"http://{HOST}:{port}", stream_timeout_s=QUEUE_TIMEOUT_S).events(path, body):
        for choice in event.get("choices", ()):
            tokens += choice.get("token_ids") or []
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
    return tokens[:-1] if finish_reason == "stop" else tokens, text
