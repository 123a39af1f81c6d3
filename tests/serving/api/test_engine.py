"""REST over a real engine. The text is the same streamed or complete, with or without speculation. A disconnect of the
client frees all KV pages.

The target is random and its tokens are bytes. So nearly every token ends inside a character or makes one invalid.
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
from tests.serving.api.scripted import MODEL, VOCAB, Client, events
from tests.serving.api.test_streams import LONG_OUTPUT, AsgiClient, wait_until
from tests.support.tiny_checkpoints import draft_folder, target_folder


class ThreadedEngine:
    """An `EngineClient` over an engine loop in this process."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[SequenceOutput | str]]] = {}
        threading.Thread(target=self._dispatch_outputs, daemon=True).start()

    def _dispatch_outputs(self) -> None:
        while not self.loop.has_ended:
            for item in self.loop.drain(0.2):
                for output in item.outputs:
                    self._put(output.request_id, output)
                for request_id, message in item.refused:
                    self._put(request_id, message)

    def _put(self, request_id: str, item: SequenceOutput | str) -> None:
        if queue_entry := self._queues.get(request_id):
            queue_entry[0].call_soon_threadsafe(queue_entry[1].put_nowait, item)

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
        base_settings: dict[str, Any] = {"dtype": "float64", "page_size": 4, "max_total_tokens": 4096, "num_threads": 1}
        if "model_path" not in settings:
            base_settings["model_path"] = target_folder(vocab_size=vocab_size, max_position=1024)
        config = EngineConfig(tokenizer_path=tokenizer_folder, **base_settings, **settings)
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
def stop_at_end(*services: EngineService) -> Iterator[tuple[EngineService, ...]]:
    """Yield the services, and stop them at the end."""
    yield services
    for service in services:
        service.grammars.close()
        assert service.engine.loop.stop()


@pytest.fixture(scope="module")
def services(tokenizer_folder: Any) -> Iterator[tuple[EngineService, ...]]:
    """Two services of the same target: the first speculates with draft trees, the second decodes plainly."""
    draft_path = draft_folder(target_folder(vocab_size=VOCAB, max_position=1024))
    tree_settings = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft_path, **TREE}
    with stop_at_end(
        EngineService(str(tokenizer_folder), **tree_settings), EngineService(str(tokenizer_folder))
    ) as both_services:
        yield both_services


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
    tree_client, plain_client = (Client(make_app(service)) for service in services)
    tree_answer, plain_answer = tree_client.complete(**body).json(), plain_client.complete(**body).json()
    chunks = events(tree_client.complete(**body, stream=True, stream_options={"include_usage": True}))
    streamed_texts = [""] * len(tree_answer["choices"])
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed_texts[choice["index"]] += choice["text"]
    compared_fields = ("text", "finish_reason", "stop_reason")
    assert [[c[key] for key in compared_fields] for c in tree_answer["choices"]] == [
        [c[key] for key in compared_fields] for c in plain_answer["choices"]
    ]
    assert streamed_texts == [choice["text"] for choice in tree_answer["choices"]]
    usage = [answer["usage"]["completion_tokens"] for answer in (tree_answer, plain_answer, chunks[-1])]
    assert len(set(usage)) == 1
    if "logprobs" in fields:
        tree_logprobs, plain_logprobs = (answer["choices"][0]["logprobs"] for answer in (tree_answer, plain_answer))
        assert tree_logprobs["tokens"] == plain_logprobs["tokens"]
        assert tree_logprobs["token_logprobs"] == pytest.approx(plain_logprobs["token_logprobs"], abs=1e-9)
    speculation = tree_answer.get("metrics", {}).get("speculative_decoding")
    if speculation:
        histogram = speculation["acceptance_histogram"]
        assert sum(histogram) == speculation["num_spec_steps"]
        assert sum(j * count for j, count in enumerate(histogram)) == speculation["num_accepted_draft_tokens"]


def test_logit_bias_allowed_tokens_and_bad_words_shape_the_text(services: tuple[EngineService, EngineService]) -> None:
    client = Client(make_app(services[0]))

    def text(**fields: Any) -> str:
        body = {"prompt": "once", "max_tokens": 60, "seed": 1, "ignore_eos": True, **fields}
        choice_text: str = client.complete(**body).json()["choices"][0]["text"]
        return choice_text

    assert set(text(allowed_token_ids=[97, 98, 99])) == {"a", "b", "c"}
    assert "a" in text(logit_bias={"97": 100}, max_tokens=1)
    assert "ac" in text(allowed_token_ids=[97, 98, 99])
    assert "ac" not in text(allowed_token_ids=[97, 98, 99], bad_words=["ac"])
    assert len(text(allowed_token_ids=[97, 98, 99], stop=["a", "b", "c"])) == 0
    assert len(text(allowed_token_ids=[97, 98, 99], stop=["a", "b", "c"], min_tokens=7)) == 7


def test_prefix_cache_is_not_shared_between_api_keys(services: tuple[EngineService, EngineService]) -> None:
    """A key never finds the prefix of another key, neither after that key's request nor while it runs.

    cached_tokens is 0, and no request waits for a prompt of another key.
    """
    names = ("ann", "bob")
    keys = ApiKeys(None, [ApiKey(name, "use", digest_of(name.encode())) for name in names])
    app_with_keys, keyless_client = make_app(services[0], keys=keys), Client(make_app(services[0]))

    def cached_tokens_of(client: Client, prompt: str, name: str = "", **fields: Any) -> int:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, **fields}
        answer = client.post("/v1/completions", body, headers={"x-api-key": name})
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    secret = "the password of the vault is " + "42" * 40
    assert cached_tokens_of(keyless_client, secret) == 0 and cached_tokens_of(keyless_client, secret) > 90
    client = Client(app_with_keys)
    for name in names:
        assert cached_tokens_of(client, secret, name) == 0, "found a prefix sent without a key or with another key"
        assert cached_tokens_of(client, secret, name) > 90, "did not find the prefix sent with the same key"
        assert cached_tokens_of(client, secret, name, cache_salt="of one user") == 0
        assert cached_tokens_of(client, secret, name, cache_salt="of one user") > 90
    assert cached_tokens_of(keyless_client, secret, cache_salt="of one user") == 0

    shared_prompt = "meeting: " + "x" * 100
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(cached_tokens_of, client, shared_prompt, names[index % 2]) for index in range(6)]
        found = [sorted(future.result() for future in futures[index::2]) for index in range(2)]
    for key_counts in found:
        assert key_counts[0] == 0, "the first request of a key found a cached prefix"
    services[0].check_pages()


def test_client_disconnects_free_all_kv_pages_in_every_api(services: tuple[EngineService, EngineService]) -> None:
    """Sixty clients call three APIs and disconnect at different times."""
    service = services[0]
    common_fields = {"prompt": None, "ignore_eos": True}

    def request_of(index: int) -> tuple[str, dict[str, Any]]:
        conversation = [{"role": "user", "content": f"visitor {index % 7}"}]
        return (
            ("/v1/completions", {"prompt": f"visitor {index % 7}", **LONG_OUTPUT}),
            ("/v1/responses", {**common_fields, "input": conversation, "max_output_tokens": 48}),
            ("/v1/messages", {**common_fields, "messages": conversation, "max_tokens": 48}),
        )[index // 2 % 3]

    def idle() -> bool:
        status = service.engine.loop.heartbeat().status
        return status.running == 0 and status.waiting == 0 and status.pages_used == 0

    async def scenario() -> None:
        app = make_app(service)
        asgi_clients = []
        for index in range(60):
            path, body = request_of(index)
            asgi_clients.append(AsgiClient(app, {**body, "stream": index % 4 > 0}, path))
            asyncio.get_running_loop().call_later(0.009 * (index * 37 % 101), asgi_clients[-1].disconnected.set)
        await asyncio.wait_for(asyncio.gather(*(asgi_client.task for asgi_client in asgi_clients)), 60)
        await wait_until(idle)

    asyncio.run(scenario())
    service.check_pages()
