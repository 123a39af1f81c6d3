"""One request on the host, waiting or running: its tokens, its lease, and how far it is committed."""

from dataclasses import dataclass

from cluster.batch import Sampling
from cluster.engine.finish import FinishCheck
from cluster.kv.cache import Lease
from cluster.request import Request, SpeculationCounts


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's life in the engine.

    `tokens` are prompt and output; `committed` of them have KV in every pool. While `committed < len(tokens) - 1` (or
    no token was chosen yet) the request prefills; afterwards it decodes and its last token is the bonus.
    """

    request: Request
    finish: FinishCheck
    tokens: list[int]
    prompt_len: int
    accepted: list[int]
    committed: int = 0
    prefilling: bool = True
    lease: Lease | None = None
    cached_tokens: int | None = None
    steps: int = 0
    drafted: int = 0

    @property
    def row(self) -> int:
        """The request's row in the tables; running requests have one."""
        assert self.lease is not None, "only running requests have a row"
        return self.lease.row

    def sampling(self) -> Sampling:
        """How its tokens are to be chosen, for the tables."""
        p = self.request.params
        assert p.seed is not None, "every request is given a seed when it is submitted"
        return Sampling(self.row, p.temperature, p.top_k, p.top_p, p.min_p, p.seed)

    @property
    def room(self) -> int:
        """Tokens that the request may still generate."""
        return self.prompt_len + self.request.params.max_tokens - len(self.tokens)

    def join(self, lease: Lease) -> None:
        """Run on a lease, whose cached tokens are committed from the start."""
        self.lease, self.committed = lease, lease.cached
        if self.cached_tokens is None:
            self.cached_tokens = lease.cached

    def leave(self) -> None:
        """The lease is closed; if the request joins again, it prefills again."""
        self.lease, self.committed, self.prefilling = None, 0, True

    def prefilled(self, stop: int, final: bool) -> None:
        """Tokens up to `stop` are committed; after the final chunk the request decodes."""
        self.committed, self.prefilling = stop, not final

    def accepted_run(self, count: int) -> None:
        """So many more tokens are committed: the accepted path and what it follows."""
        self.committed += count

    def extend(self, tokens: list[int]) -> None:
        """Append what was generated."""
        self.tokens += tokens

    def count(self, accept_len: int, drafted: int) -> None:
        """Note one verified tree."""
        self.steps += 1
        self.drafted += drafted
        self.accepted[accept_len - 1] += 1

    def speculation(self) -> SpeculationCounts | None:
        """The counts so far; None when no tree was ever drafted."""
        return SpeculationCounts(self.steps, self.drafted, tuple(self.accepted)) if self.drafted else None
