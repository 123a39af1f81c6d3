"""A lightweight client for streamed completions. It uses plain HTTP from the standard library and a thread per stream.

On a small machine, client and server share the cores, so the client must use little CPU time.
"""

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.bench.report import median

POLL_INTERVAL_S = 0.02
TIMEOUT_S = 120.0
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and its sampling parameters."""

    text: str
    temperature: float = 0.0
    seed: int = 0

    def body(self, model: str, max_tokens: int) -> dict[str, Any]:
        """Return the JSON body of a completion request that ignores EOS. The answer is a stream with token ids; its
        last event has the counts of speculation.
        """
        return {
            "model": model,
            "prompt": self.text,
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


@dataclass(slots=True)
class ClientStream:
    """The state of one stream. The stream's own thread writes it; other threads only read it. The own thread also calls
    `on_event` at every event. `steps` counts verified trees. Times are those of `time.perf_counter`.
    """

    prompt: Prompt
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    started_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float | None = None
    finish_reason: str | None = None
    steps: int = 0
    accepted_tokens: int = 0
    error: str | None = None
    on_event: Callable[[], None] | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end of the stream, or to now if it still runs; 0.0 before the start."""
        return (self.ended_at or time.perf_counter()) - self.started_at if self.started_at else 0.0

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the start to the first token, or None without a token."""
        return None if self.first_token_at is None else self.first_token_at - self.started_at

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of this stream; the time to the first token counts."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    def add_event(self, event: dict[str, Any]) -> None:
        """Add the contents of one event of the stream."""
        if self.on_event is not None:
            self.on_event()
        if "error" in event:
            self.error = str(event["error"].get("message", event["error"]))
            return
        for choice in event.get("choices", ()):
            if choice.get("token_ids"):
                self.first_token_at = self.first_token_at or time.perf_counter()
                self.token_ids += choice["token_ids"]
            self.text += choice.get("text", "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        counts = (event.get("metrics") or {}).get("speculative_decoding")
        if counts:
            self.steps, self.accepted_tokens = counts["num_spec_steps"], counts["num_accepted_draft_tokens"]

    def run(self, port: int, model: str, max_tokens: int, timeout_s: float = TIMEOUT_S) -> None:
        """Send the request and read the stream to its end. `error` stores a failure, a timeout or a wrong end."""
        self.started_at = time.perf_counter()
        connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
        try:
            body = json.dumps(self.prompt.body(model, max_tokens))
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                self.error = f"status {response.status}: {response.read(2000).decode(errors='replace')}"
                return
            for line in response:
                if line.startswith(b"data: {"):
                    self.add_event(json.loads(line[6:]))
            if self.error is None and (self.finish_reason, len(self.token_ids)) != ("length", max_tokens):
                self.error = f"ended with {self.finish_reason!r} after {len(self.token_ids)} of {max_tokens} tokens"
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.ended_at = time.perf_counter()
            connection.close()


def get_page(port: int, path: str) -> str:
    """Return the server's answer to GET `path`."""
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=TIMEOUT_S) as response:
        return str(response.read(), "utf-8")


def served_model(port: int) -> str:
    """Return the id of the server's first model."""
    return str(json.loads(get_page(port, "/v1/models"))["data"][0]["id"])


def stream_all(
    port: int,
    model: str,
    prompts: Sequence[Prompt],
    max_tokens: int,
    on_poll: Callable[[list[ClientStream]], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[ClientStream]:
    """Stream all prompts at once and wait for all streams. `on_poll` is called with the streams again and again while
    they run, and once at the end. A stream that receives nothing for `timeout_s` fails.
    """
    streams = [ClientStream(prompt) for prompt in prompts]
    threads = [threading.Thread(target=s.run, args=(port, model, max_tokens, timeout_s), daemon=True) for s in streams]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if on_poll is not None:
            on_poll(streams)
        next((t for t in threads if t.is_alive()), threads[0]).join(POLL_INTERVAL_S)
    if on_poll is not None:
        on_poll(streams)
    return streams


def stream_errors(streams: Sequence[ClientStream]) -> list[str]:
    """Return the errors of the streams that failed or did not end with all their tokens."""
    return [stream.error for stream in streams if stream.error is not None]


def first_token_ms(streams: Sequence[ClientStream]) -> float:
    """Return the median milliseconds to the first token, over the streams that have a token; 0.0 if none has."""
    return median([1000 * stream.first_token_s for stream in streams if stream.first_token_s is not None])


def total_tokens_per_second(streams: Sequence[ClientStream]) -> float:
    """Return the tokens per second of all streams together, from the first start to the last end; 0.0 before an end."""
    ends = [s.ended_at for s in streams if s.ended_at is not None]
    seconds = max(ends) - min(s.started_at for s in streams) if ends else 0.0
    return sum(len(s.token_ids) for s in streams) / seconds if seconds else 0.0


def accept_length(streams: Sequence[ClientStream]) -> float:
    """Return the tokens committed per verified tree over all streams, or 0.0 if nothing was drafted."""
    steps = sum(s.steps for s in streams)
    return 1.0 + sum(s.accepted_tokens for s in streams) / steps if steps else 0.0
