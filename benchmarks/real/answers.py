"""What each side answers: `transformers`, this engine without a server, and `aerie serve` over REST.

Each function is a stage of its own process, so that its peak of memory is its own, and returns JSON-ready results.
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

from benchmarks.real.kept import Kept
from benchmarks.real.prompts import Prompt
from cluster.bench.processes import memory_of
from cluster.bench.server import ServerProcess
from cluster.bench.streams import HOST
from cluster.config import EngineConfig
from cluster.engine import Engine, build_engine
from cluster.offline.stepping import complete
from cluster.request import Request, RequestParams
from cluster.tools.client import Client

BATCHES = (1, 16)
MODEL = "real"
NO_DRAFT = ("speculative_algorithm=null", "tp_size=1", "attn_dp_size=1")
PATIENCE_S = 900.0  # of the server's queue
KIB = 1024
PADDED = 256  # tokens of the longest prompt that `transformers` pads others to

Tokens = list[list[int]]


def tokenizer_of(folder: str) -> Any:
    """The folder's tokenizer, by `transformers`."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def say(text: str) -> None:
    """Tell the user how far a stage is; its result goes to stdout."""
    print(f"real: {text}", file=sys.stderr, flush=True)


def peak_mib() -> float:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB


def by_transformers(folder: str, prompts: Sequence[Prompt], new_tokens: int, kept: Kept) -> dict[str, Any]:
    """Greedy answers in float32 by `transformers`, one prompt at a time and in batches of 16, and its peak memory."""
    tokenizer = tokenizer_of(folder)
    ids = [prompt.token_ids(tokenizer) for prompt in prompts]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    found = {str(batch): _generated(model, ids, new_tokens, batch, kept) for batch in BATCHES}
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found["1"]]
    return {"prompts": ids, "greedy": found, "texts": texts, "peak_mib": peak_mib()}


def _generated(model: Any, prompts: Tokens, new_tokens: int, batch: int, kept: Kept) -> Tokens:
    """The tokens after each prompt, up to its end-of-text token or `new_tokens`. Prompts of a batch are padded on the
    left, so those of similar length are together, and those over `PADDED` tokens are alone.
    """
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    short = [at for at in order if len(prompts[at]) <= PADDED]
    parts = [short[start : start + batch] for start in range(0, len(short), batch)]
    parts += [[at] for at in order if at not in short]
    answers: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        say(f"transformers, batch {batch}: {number + 1} of {len(parts)}")
        made = kept.get(f"{batch}, {part}", partial(_continued, model, [prompts[at] for at in part], new_tokens))
        answers |= zip(part, made, strict=True)
    return [answers[at] for at in range(len(prompts))]


@torch.inference_mode()
def _continued(model: Any, prompts: Tokens, new_tokens: int) -> Tokens:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return [cut(row, ends_of(model)) for row in made[:, width:].tolist()]


def ends_of(model: Any) -> list[int]:
    """The tokens that end an answer of a model of `transformers`."""
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


def cut(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """An answer up to its end token, which is left out; what follows it is padding."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in ends), len(tokens))]


def by_engine(folder: str, prompts: Sequence[Prompt], new_tokens: int, kept: Kept) -> dict[str, Any]:
    """Answers in float32 by this engine: greedy one request at a time and 16 at once, sampled at temperature 1 with 16
    at once; and its peak memory.
    """
    tokenizer = tokenizer_of(folder)
    ids = [prompt.token_ids(tokenizer) for prompt in prompts]
    engine = engine_of(folder, "float32", max(BATCHES))

    def answered(temperature: float, batch: int) -> Tokens:
        made: Tokens = []
        for start in range(0, len(ids), batch):
            say(f"engine, temperature {temperature:g}, batch {batch}: {start} of {len(ids)}")
            seeds = range(start, min(start + batch, len(ids)))
            requests = [Request(str(s), tuple(ids[s]), params_of(temperature, new_tokens, s)) for s in seeds]
            made += kept.get(f"{temperature}, {batch}, {start}", partial(complete, engine, requests))
        return [cut(one, engine.info().eos_token_ids) for one in made]

    greedy = {str(batch): answered(0.0, batch) for batch in BATCHES}
    sampled = answered(1.0, max(BATCHES))
    return {"prompts": ids, "greedy": greedy, "sampled": sampled, "peak_mib": peak_mib()}


def engine_of(folder: str, dtype: str, requests: int, reuse: bool = True) -> Engine:
    """An engine for so many requests at once, on as many threads as torch has (`OMP_NUM_THREADS`); without `reuse` it
    computes a prompt that it has seen before again. All other settings are the defaults.
    """
    settings: dict[str, Any] = {"model_path": folder, "dtype": dtype, "max_running_requests": requests}
    settings["num_threads"] = torch.get_num_threads()
    return build_engine(EngineConfig.from_kwargs(settings | {"disable_radix_cache": not reuse}))


def params_of(temperature: float, new_tokens: int, seed: int) -> RequestParams:
    """How an answer is drawn."""
    return RequestParams(temperature=temperature, seed=seed, max_tokens=new_tokens)


def by_server(folder: str, prompts: Sequence[Prompt], new_tokens: int) -> dict[str, Any]:
    """Streamed answers of `aerie serve` in float32, 16 at once, greedy and at temperature 1: tokens, and the text of
    all events joined. Chats go to /v1/chat/completions. Memory is that of all processes of the server.
    """
    patient = f"max_queue_wait_s={PATIENCE_S}"  # on a busy machine too, nobody is to be refused
    settings = [*NO_DRAFT, f"model_path={folder}", f"model_id={MODEL}", "dtype=float32", patient]
    began = time.monotonic()
    with ServerProcess(settings) as server, ThreadPoolExecutor(max(BATCHES)) as clients:
        ready_s = time.monotonic() - began
        found: dict[str, Any] = {}
        for temperature, name in ((0.0, "greedy"), (1.0, "sampled")):
            say(f"server: {name}")
            bodies = [body_of(prompt, new_tokens, temperature, seed) for seed, prompt in enumerate(prompts)]
            answers = list(clients.map(lambda body: streamed(server.port, *body), bodies))
            found[name] = [tokens for tokens, _ in answers]
            found[f"{name}_texts"] = [text for _, text in answers]
        memory = memory_of(server.processes())
    return found | {"ready_s": ready_s, "processes": memory.processes, "proportional_mib": memory.proportional_mib}


def body_of(prompt: Prompt, new_tokens: int, temperature: float, seed: int) -> tuple[str, dict[str, Any]]:
    """The path and the JSON of a streamed request."""
    body = {"model": MODEL, "max_tokens": new_tokens, "temperature": temperature, "seed": seed, "stream": True}
    body |= {"return_token_ids": True}
    if prompt.messages:
        return "/v1/chat/completions", body | {"messages": prompt.chat}
    return "/v1/completions", body | {"prompt": prompt.text}


def streamed(port: int, path: str, body: dict[str, Any]) -> tuple[list[int], str]:
    """The token ids and the joined text of a streamed answer, without the token that ended it.

    Raises:
        NoAnswerError: the server answered with an error.
    """
    tokens, text, ended = list[int](), "", ""
    for event in Client(f"http://{HOST}:{port}", stream_timeout_s=PATIENCE_S).events(path, body):
        for choice in event.get("choices", ()):
            tokens += choice.get("token_ids") or []
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            ended = choice.get("finish_reason") or ended
    return tokens[:-1] if ended == "stop" else tokens, text
