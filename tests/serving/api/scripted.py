"""Fakes for a REST app: an engine that generates a script, a byte-level tokenizer of 259 tokens, a client
without HTTP.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.actors.messages import GangHistory, GangStatus, Heartbeat, Overloaded
from cluster.api.core.grammars import Grammars
from cluster.api.core.limits import ModelInfo
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.observability.metrics import ServingMetrics, merge
from cluster.request import Request, Seeds, SequenceOutput, SpeculationCounts, StepTree, TokenLogprob
from cluster.status import EngineStatus
from cluster.tokenizer.stop_strings import StopFinder
from cluster.tokenizer.tokenizer import BYTE_OF_CHARACTER, IncrementalDetokenizer
from tests.support.rank_info import rank_info

MODEL = "demo"
CONTEXT = 512
EOS, IM_START, IM_END = 256, 257, 258
VOCAB = 259
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'refuse' %}{{ raise_exception('no refuse here') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% if shout %}!{% endif %}{{ sign }}"
    "{% if shout is defined and not shout %}{{ 1 + shout }}{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None = TEMPLATE, more_special_tokens: Sequence[str] = ()) -> Path:
    """Write a tokenizer that both transformers and the engine can read, and return its folder.

    Token ids below 256 are bytes. `more_special_tokens` get the ids from 259.
    """
    names = sorted(BYTE_OF_CHARACTER, key=BYTE_OF_CHARACTER.__getitem__)
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = [
        AddedToken(text, special=True) for text in ("<eos>", "<|im_start|>", "<|im_end|>", *more_special_tokens)
    ]
    tokenizer.add_special_tokens(special_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


RANK = rank_info(page_size=16, pid=7)
HEARTBEAT = Heartbeat(0, steps=3, busy=False, idle_s=0.0, status=EngineStatus(steps=3, accept_length=2.5))


class ScriptedEngine:
    """An engine that generates the tokens of `script`, or letters that depend on the seed where `script` is None.

    A step commits 1, 2, 3, 1, ... tokens.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.script: bytes | list[int] | None = None
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.queue_is_full = False
        self.refusals = 0
        self.retry_after_s = 0.0
        self.refusal = ""
        self.fail_at: int | None = None
        self.failure: SequenceOutput | Exception | None = None
        self.reason = ""
        self.history = GangHistory()
        self.step_s = 0.0
        self.speculates = True
        self.tree: StepTree | None = None
        self._tokenizer = tokenizer.text_tokenizer
        self._seeds = Seeds(0)

    def _token(self, request: Request, index: int) -> int:
        if self.script is not None:
            return self.script[index] if index < len(self.script) else EOS
        return 97 + hashlib.blake2b(f"{request.params.seed}/{index}".encode()).digest()[0] % 26

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        request = self._seeds.fill(request)
        self.requests.append(request)
        if self.queue_is_full:
            self.refusals += 1
            raise Overloaded("the queue holds 70000 tokens (max_queued_tokens is 65536)")
        if self.refusal:
            raise ValueError(self.refusal)
        self.running.add(request.request_id)
        try:
            async for output in self._outputs(request):
                yield output
        finally:
            if request.request_id in self.running:
                self.running.discard(request.request_id)
                self.aborted.append(request.request_id)

    async def _outputs(self, request: Request) -> AsyncIterator[SequenceOutput]:
        params = request.params
        detokenizer = IncrementalDetokenizer(self._tokenizer, request.prompt_token_ids)
        finder = StopFinder(params.stop)
        committed_count, histogram = 0, [0, 0, 0]
        while True:
            await asyncio.sleep(self.step_s)
            step_tokens: list[int] = []
            reason, stop_reason = None, None
            step_size = 1 + sum(histogram) % 3
            while reason is None and len(step_tokens) < step_size:
                token = self._token(request, committed_count)
                step_tokens.append(token)
                committed_count += 1
                stop_match = finder.find(detokenizer.push([token]))
                if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
                    reason, stop_reason = "stop", token
                elif stop_match:
                    reason, stop_reason = "stop", stop_match.stop
                elif committed_count == params.max_tokens:
                    reason = "length"
            histogram[len(step_tokens) - 1] += 1
            if self.fail_at is not None and committed_count > self.fail_at:
                if isinstance(self.failure, Exception):
                    raise self.failure
                if self.failure is not None:
                    yield self.failure
                    return
                self.running.discard(request.request_id)
                yield SequenceOutput(request.request_id, (), finish_reason="error", error="/secret/path.py exploded")
                return
            if reason:
                self.running.discard(request.request_id)
            top_logprobs = tuple(
                (token, -float(k + 1)) for k, token in enumerate(range(97, 97 + (params.logprobs or 0)))
            )
            yield SequenceOutput(
                request.request_id,
                tuple(step_tokens),
                ()
                if params.logprobs is None
                else tuple(TokenLogprob(token, -0.5, top_logprobs) for token in step_tokens),
                finish_reason=reason,
                stop_reason=stop_reason,
                cached_tokens=2,
                speculation=SpeculationCounts(sum(histogram), 2 * sum(histogram), tuple(histogram))
                if reason and self.speculates
                else None,
                tree=self.tree if params.return_tree and committed_count > len(step_tokens) else None,
            )
            if reason:
                return

    def overload(self) -> Overloaded | None:
        return Overloaded("the server is full", self.retry_after_s) if self.retry_after_s else None

    async def status(self) -> GangStatus:
        return GangStatus(not self.reason, self.reason, 0, len(self.running), self.history, (RANK,), (HEARTBEAT,))

    async def metrics(self) -> list[bytes]:
        return []


class ScriptedService:
    """A `cluster.api.core.service.Service` over a scripted engine."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: ChatTokenizer | None = ChatTokenizer.load(str(folder))
        self.engine = ScriptedEngine(self.tokenizer)
        self.model = ModelInfo(MODEL, CONTEXT, VOCAB, created=1_700_000_000)
        self.grammars = Grammars(self.tokenizer, self.model)
        self.metrics = ServingMetrics(model_name=MODEL)

    async def metric_samples(self) -> list[bytes]:
        return [self.metrics.serialize(), *await self.engine.metrics()]

    async def metrics_page(self) -> bytes:
        return merge(await self.metric_samples())

    def outcomes(self) -> dict[str, float]:
        """How many requests have ended so far, by outcome; outcomes of no request are left out."""
        counts = {name: counter._value.get() for name, counter in self.metrics.outcomes.items()}
        return {name: count for name, count in counts.items() if count}


class Client:
    """A client that calls an app in this process, with a new event loop for each call."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(call())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **kwargs)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": "hello", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post(
            "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        )


def http_scope(path: str, method: str = "POST", headers: Sequence[tuple[bytes, bytes]] = (), **overrides: Any) -> Any:
    """The ASGI scope that uvicorn passes to an app. `path` is as on the wire; `overrides` replace keys of the scope."""
    target_path, _, query = path.partition("?")
    scope = {
        "type": "http", "method": method, "path": unquote(target_path), "raw_path": target_path.encode(),
        "root_path": "",
        "query_string": query.encode(), "headers": [(b"content-type", b"application/json"), *headers],
        "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    return scope | overrides


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON chunks of an event stream. Asserts status 200 and the final [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
