"""REST over a real engine: the text is the same streamed or whole, speculating or not, and leaving frees every page.

The target is random and its tokens are bytes, so nearly every token ends within a character or breaks one.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from cluster.actors.engine_loop import EngineLoop
from cluster.actors.messages import Commands, GangStatus, Overloaded
from cluster.api.core.api_keys import ApiKey, ApiKeys, digest_of
from cluster.api.core.grammars import Grammars
from cluster.api.core.limits import ModelInfo
from cluster.api.core.tokenizer import ChatTokenizer
from cluster.api.http.routes import make_app
from cluster.config import EngineConfig
from cluster.engine import build_engine
from cluster.observability.metrics import ServingMetrics
from cluster.request import Request, SequenceOutput
from tests.api.scripted import MODEL, VOCAB, Client, events
from tests.api.test_streams import MANY, Visitor, until
from tests.tiny import draft_folder, target_folder


class ThreadedEngine:
    """An `EngineClient` over an engine loop in this process."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[SequenceOutput | str]]] = {}
        threading.Thread(target=self._deal, daemon=True).start()

    def _deal(self) -> None:
        while not self.loop.has_ended:
            for item in self.loop.drain(0.2):
                for output in item.outputs:
                    self._put(output.request_id, output)
                for request_id, message in item.refused:
                    self._put(request_id, message)

    def _put(self, request_id: str, item: SequenceOutput | str) -> None:
        if found := self._queues.get(request_id):
            found[0].call_soon_threadsafe(found[1].put_nowait, item)

    async def generate(self, request: Request) -> AsyncIterator[SequenceOutput]:
        queue: asyncio.Queue[SequenceOutput | str] = asyncio.Queue()
        self._queues[request.request_id] = (asyncio.get_running_loop(), queue)
        self.loop.put(Commands((request,), ()))
        try:
            while True:
                item = await queue.get()
                if isinstance(item, str):
                    raise ValueError(item)
                yield item
                if item.finish_reason:
                    return
        finally:
            del self._queues[request.request_id]
            self.loop.put(Commands((), (request.request_id,)))

    def overload(self) -> Overloaded | None:
        return None

    async def status(self) -> GangStatus:
        return GangStatus(True, heartbeats=(self.loop.heartbeat(),))

    async def metrics(self) -> list[bytes]:
        return []


class EngineService:
    """A `cluster.api.core.service.Service` over a tiny random pair in float64."""

    def __init__(self, tokenizer_folder: str, vocab_size: int = VOCAB, **settings: Any) -> None:
        common: dict[str, Any] = {"dtype": "float64", "page_size": 4, "max_total_tokens": 4096, "num_threads": 1}
        if "model_path" not in settings:
            common["model_path"] = target_folder(vocab_size=vocab_size, max_position=1024)
        config = EngineConfig(tokenizer_path=tokenizer_folder, **common, **settings)
        engine = build_engine(config)
        info = engine.info()
        self.check_pages = engine.check_pages
        self.tokenizer: ChatTokenizer | None = ChatTokenizer.load(tokenizer_folder)
        self.engine = ThreadedEngine(EngineLoop(engine))
        self.engine.loop.start()
        self.model = ModelInfo(MODEL, info.context_length, info.vocab_size, 0, None, info.eos_token_ids)
        self.grammars = Grammars(self.tokenizer, self.model)
        self.metrics = ServingMetrics(model_name=MODEL)

    async def metric_samples(self) -> list[bytes]:
        return []

    async def metrics_page(self) -> bytes:
        return b""


TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 12}


@contextmanager
def stopped(*services: EngineService) -> Iterator[tuple[EngineService, ...]]:
    """The services, stopped at the end."""
    yield services
    for service in services:
        service.grammars.close()
        assert service.engine.loop.stop()


@pytest.fixture(scope="module")
def services(tokenizer_folder: Any) -> Iterator[tuple[EngineService, ...]]:
    """The same target with a tree and without."""
    draft = draft_folder(target_folder(vocab_size=VOCAB, max_position=1024))
    tree = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft, **TREE}
    with stopped(EngineService(str(tokenizer_folder), **tree), EngineService(str(tokenizer_folder))) as made:
        yield made


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 3},
        {"seed": 4, "top_p": 0.9, "top_k": 20, "n": 3},
        {"seed": 5, "stop": ["\ufffd\ufffd", "e"]},
        {"seed": 6, "stop_token_ids": [*range(40, 60)]},
        {"seed": 7, "prompt": ["aé", "日本"], "n": 2, "ignore_eos": True},
        {"temperature": 0, "prompt": [0xE2, 0x82], "logprobs": 2},
        {"seed": 8, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "n": 2},
        {"temperature": 0, "logit_bias": {"101": 3.5, "32": -100}, "bad_words": ["a", "ee"], "min_tokens": 30},
        {"seed": 9, "allowed_token_ids": [97, 98, 99, 100], "stop": ["ab", "ca"], "min_tokens": 20},
    ],
)
def test_text_is_the_same_with_and_without_speculation_and_streamed(
    services: tuple[EngineService, EngineService], fields: dict[str, Any]
) -> None:
    body = {"prompt": "once", "max_tokens": 60, **fields}
    tree, plain = (Client(make_app(service)) for service in services)
    whole, expected = tree.complete(**body).json(), plain.complete(**body).json()
    chunks = events(tree.complete(**body, stream=True, stream_options={"include_usage": True}))
    streamed = [""] * len(whole["choices"])
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    ends = ("text", "finish_reason", "stop_reason")
    assert [[c[key] for key in ends] for c in whole["choices"]] == [
        [c[key] for key in ends] for c in expected["choices"]
    ]
    assert streamed == [choice["text"] for choice in whole["choices"]]
    usage = [answer["usage"]["completion_tokens"] for answer in (whole, expected, chunks[-1])]
    assert len(set(usage)) == 1
    if "logprobs" in fields:
        mine, theirs = (answer["choices"][0]["logprobs"] for answer in (whole, expected))
        assert mine["tokens"] == theirs["tokens"]
        assert mine["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-9)
    spoken = whole.get("metrics", {}).get("speculative_decoding")
    if spoken:
        histogram = spoken["acceptance_histogram"]
        assert sum(histogram) == spoken["num_spec_steps"]
        assert sum(j * count for j, count in enumerate(histogram)) == spoken["num_accepted_draft_tokens"]


def test_logit_bias_allowed_tokens_and_bad_words_shape_the_text(services: tuple[EngineService, EngineService]) -> None:
    client = Client(make_app(services[0]))

    def text(**fields: Any) -> str:
        body = {"prompt": "once", "max_tokens": 60, "seed": 1, "ignore_eos": True, **fields}
        said: str = client.complete(**body).json()["choices"][0]["text"]
        return said

    assert set(text(allowed_token_ids=[97, 98, 99])) == {"a", "b", "c"}
    assert "a" in text(logit_bias={"97": 100}, max_tokens=1)
    assert "ac" in text(allowed_token_ids=[97, 98, 99])
    assert "ac" not in text(allowed_token_ids=[97, 98, 99], bad_words=["ac"])
    assert len(text(allowed_token_ids=[97, 98, 99], stop=["a", "b", "c"])) == 0
    assert len(text(allowed_token_ids=[97, 98, 99], stop=["a", "b", "c"], min_tokens=7)) == 7


def test_prefix_cache_is_not_shared_between_api_keys(services: tuple[EngineService, EngineService]) -> None:
    """Neither afterwards nor while it runs: cached_tokens is 0, and no request waits for a prompt of another key."""
    names = ("ann", "bob")
    keys = ApiKeys(None, [ApiKey(name, "use", digest_of(name.encode())) for name in names])
    guarded, plain = make_app(services[0], keys=keys), Client(make_app(services[0]))

    def cached(client: Client, prompt: str, name: str = "", **fields: Any) -> int:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, **fields}
        answer = client.post("/v1/completions", body, headers={"x-api-key": name})
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    secret = "the password of the vault is " + "42" * 40
    assert cached(plain, secret) == 0 and cached(plain, secret) > 90
    client = Client(guarded)
    for name in names:
        assert cached(client, secret, name) == 0, "not what was sent without a key, nor with another"
        assert cached(client, secret, name) > 90, "but what it sent itself"
        assert cached(client, secret, name, cache_salt="of one user") == 0
        assert cached(client, secret, name, cache_salt="of one user") > 90
    assert cached(plain, secret, cache_salt="of one user") == 0

    together = "meeting: " + "x" * 100
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(cached, client, together, names[at % 2]) for at in range(6)]
        found = [sorted(one.result() for one in asked[at::2]) for at in range(2)]
    for own in found:
        assert own[0] == 0, "its first found nothing"
    services[0].check_pages()


def test_client_disconnects_free_all_kv_pages_in_every_api(services: tuple[EngineService, EngineService]) -> None:
    """By every API."""
    service = services[0]
    talk = {"prompt": None, "ignore_eos": True}

    def asked(at: int) -> tuple[str, dict[str, Any]]:
        hello = [{"role": "user", "content": f"visitor {at % 7}"}]
        return (
            ("/v1/completions", {"prompt": f"visitor {at % 7}", **MANY}),
            ("/v1/responses", {**talk, "input": hello, "max_output_tokens": 48}),
            ("/v1/messages", {**talk, "messages": hello, "max_tokens": 48}),
        )[at // 2 % 3]

    def idle() -> bool:
        status = service.engine.loop.heartbeat().status
        return status.running == 0 and status.waiting == 0 and status.pages_used == 0

    async def scene() -> None:
        app = make_app(service)
        visitors = []
        for at in range(60):
            path, body = asked(at)
            visitors.append(Visitor(app, {**body, "stream": at % 4 > 0}, path))
            asyncio.get_running_loop().call_later(0.009 * (at * 37 % 101), visitors[-1].left.set)
        await asyncio.wait_for(asyncio.gather(*(visitor.call for visitor in visitors)), 60)
        await until(idle)

    asyncio.run(scene())
    service.check_pages()
