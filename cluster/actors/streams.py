"""The open streams of a replica: what each was sent, and how it goes on when the gang that fed it is gone.

By law 1 a request's tokens depend on its prompt, its settings and its seed alone. So a stream that lost its gang is
submitted again with the tokens it was sent as part of its prompt, and its client sees a pause.
"""

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.actors.messages import Loss
from cluster.request import Request, RequestOutput, SpeculationCounts

RESUMES = 3  # a stream that was resumed so often without a token in between may be what ends the gang


@dataclass(frozen=True, slots=True)
class Refusal:
    """In a stream's queue: the engine would not take the request."""

    message: str


@dataclass(slots=True, eq=False)
class Stream:
    """One request that is open here. `request` is as it arrived, with a seed; `dealt` are the tokens sent since.

    `started` says that it was given a token or is over, so that it no longer counts as queued; `cached_tokens` is what
    its prompt found cached then. `submitted` and `fruitful` are about the gang's present life: whether the request was
    given to it, and whether it gave tokens in return. A `suspect` was in a life that ended without giving it any.
    """

    request: Request
    expected: float
    queue: asyncio.Queue[RequestOutput | Refusal] = field(default_factory=asyncio.Queue)
    rank: int = -1
    dealt: list[int] = field(default_factory=list)
    started: bool = False
    ended: bool = False
    submitted: bool = False
    fruitful: bool = False
    suspect: bool = False
    submissions: int = 0
    fruitless_resumes: int = 0
    cached_tokens: int = 0
    trees: list[int] = field(default_factory=list)  # tokens that each tree of this life committed
    earlier: SpeculationCounts | None = None  # of the lives before

    @property
    def name(self) -> str:
        """The request's id."""
        return self.request.request_id

    def submission(self) -> Request:
        """The request as the gang is to get it now; calling this submits it."""
        self.submissions += 1
        self.submitted = True
        return replace(
            self.request,
            prompt_token_ids=self.request.prompt_token_ids + tuple(self.dealt),
            resumed_tokens=self.request.resumed_tokens + len(self.dealt),
        )

    def take(self, output: RequestOutput) -> RequestOutput:
        """Note an output of the present life; what the client is to get of it."""
        if self.fruitful and output.token_ids:  # the first output of a life ends its prompt; each later one is a tree
            self.trees.append(len(output.token_ids))
        if output.token_ids:
            self.dealt += output.token_ids
            self.fruitful, self.suspect, self.fruitless_resumes = True, False, 0
        self.ended = output.finish_reason is not None
        speculation = _added(self.earlier, output.speculation) if self.ended else output.speculation
        # tokens of its own that a resumed request finds in a rank's cache are not the client's prompt
        return replace(output, cached_tokens=self.cached_tokens, speculation=speculation)

    def lose(self, nodes: int) -> None:
        """The gang is gone; `nodes` are the drafted tokens of one tree, 0 without speculation."""
        if self.submitted and not self.fruitful:
            self.suspect = True
            self.fruitless_resumes += self.submissions > 1
        if nodes and self.trees:
            accepted = [0] * max(self.trees)
            for tokens in self.trees:
                accepted[tokens - 1] += 1
            lived = SpeculationCounts(len(self.trees), nodes * len(self.trees), tuple(accepted))
            self.earlier = _added(self.earlier, lived)
        self.trees = []
        self.submitted = self.fruitful = False

    def end(self, reason: str, finish_reason: Literal["error", "abort"] = "error") -> None:
        """End it with an error that says why, or because the server is ending."""
        if not self.ended:
            self.ended = True
            self.queue.put_nowait(RequestOutput(self.name, (), finish_reason=finish_reason, error=reason))


def _added(first: SpeculationCounts | None, second: SpeculationCounts | None) -> SpeculationCounts | None:
    """Two counts as one; a tree may be deeper in one than in the other."""
    if first is None or second is None:
        return first or second
    size = max(len(first.accepted), len(second.accepted))
    padded = [(*counts.accepted, *[0] * (size - len(counts.accepted))) for counts in (first, second)]
    accepted = tuple(a + b for a, b in zip(*padded, strict=True))
    return SpeculationCounts(first.steps + second.steps, first.drafted + second.drafted, accepted)


class Recovery:
    """Which streams a new life is given, and when.

    Streams that made progress in the life before go first, all together. Suspects follow one at a time, each when the
    one before has its first token: should one of them end the gang again, it was alone, and nobody else is blamed.
    """

    def __init__(self) -> None:
        self._waiting: list[Stream] = []
        self._pending: set[str] = set()

    def begin(self, streams: list[Stream]) -> list[Stream]:
        """A new life begins; the streams to submit now."""
        self._waiting = sorted((s for s in streams if s.suspect), key=lambda s: (s.fruitless_resumes, -len(s.dealt)))
        first = [s for s in streams if not s.suspect]
        self._pending = {s.name for s in first}
        return first or self.settled("")

    def settled(self, name: str) -> list[Stream]:
        """A stream has its first token of this life, or is over; the streams to submit now."""
        self._pending.discard(name)
        if self._pending or not self._waiting:
            return []
        while self._waiting:
            stream = self._waiting.pop(0)
            if not stream.ended:
                self._pending = {stream.name}
                return [stream]
        return []


def end_culprits(streams: list[Stream], loss: Loss) -> None:
    """End the streams that were resumed too often without a token in between."""
    for stream in streams:
        if stream.fruitless_resumes >= RESUMES:
            stream.end(
                f"request {stream.name} was resumed {RESUMES} times without a new token, and the gang was lost each "
                f"time; it may be the cause ({loss})"
            )


def with_seed(request: Request, seeds: random.Random) -> Request:
    """The request with a seed, so that any of its tokens can be drawn again."""
    if request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=seeds.getrandbits(62)))
