"""Pairs of a target family and a draft: which of them are accepted, and a check of law 1 on one pair."""

from dataclasses import dataclass, field
from functools import cache

import torch

from cluster.arch import DraftSpec, read_target
from cluster.config import ConfigError
from cluster.engine import build_engine
from cluster.request import Request
from tests.parity.drafts import correct
from tests.parity.harness import SAMPLING, RunResult, config_of, make_request, run, run_one_by_one, texts_of
from tests.support.families import FAMILIES, LAYERS, VOCAB, family_checkpoint
from tests.support.loading import check_draft
from tests.unit.models.draft_cases import CASES
from tests.unit.models.mtp_cases import LISTS

DEEP = 8
"""Number of target layers for drafts with EAGLE-3's default aux layers, which ascend from 8 target layers on."""
DRAFTS = (*CASES, *LISTS)
SHAPES = {"chain": (1, 3), "tree": (3, 3)}
"""(topk, num_steps)."""
PAGES, CHUNKS = (4, 1, 16), (16, 7, -1)
RATE = 0.75


@dataclass(frozen=True)
class Pair:
    """A target family and a draft. The number `turn` selects the family's config, the page size, the chunk size, and
    chain or tree.
    """

    family: str
    draft: str
    turn: int

    @property
    def layers(self) -> int:
        return DEEP if self.draft == "original" else LAYERS

    @property
    def case(self) -> str:
        cases = list(FAMILIES[self.family].cases)
        return cases[self.turn % len(cases) if self.layers == LAYERS else 0]

    @property
    def shape(self) -> str:
        return list(SHAPES)[self.turn // 9 % 2]

    @property
    def target(self) -> str:
        return family_checkpoint(self.family, self.case, self.layers).folder

    def spec(self) -> DraftSpec:
        """Return the spec of the draft, read for this target. Every tensor of the draft must be accounted for.

        Raises:
            ConfigError: the target and the draft do not fit together.
        """
        return check_draft(draft_of(self.draft), read_target(self.target))

    def __str__(self) -> str:
        return f"{self.family} ({self.case}) with {self.draft}"


@dataclass
class Tally:
    """Totals over runs: what was compared and what differed. `accepted` is the set of accept lengths that occurred,
    `cached` the number of prompt tokens found in the prefix cache.
    """

    runs: int = 0
    requests: int = 0
    tokens: int = 0
    mismatches: list[str] = field(default_factory=list)
    accepted: set[int] = field(default_factory=set)
    cached: int = 0

    def __iadd__(self, other: "Tally") -> "Tally":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) | value if name == "accepted" else getattr(self, name) + value)
        return self


def all_pairs() -> list[Pair]:
    """Return every family with every draft. `turn` differs between drafts, so that all configs of a family occur."""
    return [Pair(family, draft, f + d) for f, family in enumerate(FAMILIES) for d, draft in enumerate(DRAFTS)]


def diagonal() -> list[Pair]:
    """Return a pair for each draft. Each family occurs at least once, in its first config."""
    families = list(FAMILIES)
    return [Pair(families[d % len(families)], draft, 0) for d, draft in enumerate(DRAFTS)]


def refusal_reason(pair: Pair) -> str:
    """Return the error message if the draft is refused for the target, or an empty string."""
    try:
        pair.spec()
    except ConfigError as error:
        return str(error)
    return ""


@cache
def draft_of(name: str) -> str:
    """Return the folder of a draft. The draft is written once per process."""
    return (LISTS[name] if name in LISTS else CASES[name]).folder()


def algorithm_of(spec: DraftSpec) -> str:
    """Return the `speculative_algorithm` of a draft."""
    return {"eagle3": "EAGLE3", "mtp": "NEXTN"}.get(spec.kind, "EAGLE")


def requests() -> list[Request]:
    """Return greedy and sampled requests. Their texts cross pages of 4 and of 16 tokens. The prompts of `a` and `c`
    share 20 tokens; `e` may end early.
    """

    def prompt(length: int, seed: int = 1) -> list[int]:
        return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    full_length_params = {"max_tokens": 14, "ignore_eos": True}
    return [
        make_request("a", prompt(33), SAMPLING["greedy"], **full_length_params),
        make_request("b", prompt(7, 2), SAMPLING["0.8"], seed=3, **full_length_params),
        make_request("c", [*prompt(33)[:20], *prompt(9, 3)], SAMPLING["filtered"], seed=4, **full_length_params),
        make_request("d", prompt(1), SAMPLING["greedy"], **full_length_params),
        make_request("e", prompt(15, 4), SAMPLING["0.8"], seed=5, max_tokens=18),
    ]


@cache
def plain(target: str) -> RunResult:
    """The oracle: plain decoding of the requests, one by one, without prefix reuse."""
    return run_one_by_one(build_engine(config_of(target, disable_radix_cache=True)), requests())


def check(pair: Pair, shape: str) -> Tally:
    """Run the requests together, then again from cached pages, and compare them with plain decoding.

    The draft is the real one, with its forwards and its KV. Its finished trees get the true tokens with probability
    `RATE` per level, since a random draft alone would be right once in `VOCAB` times.
    """
    target, algorithm = pair.target, algorithm_of(pair.spec())
    settings = {"page_size": PAGES[pair.turn % 3], "chunked_prefill_size": CHUNKS[pair.turn // 3 % 3]}
    topk, num_steps = SHAPES[shape]
    config = config_of(target, draft_of(pair.draft), topk, num_steps, speculative_algorithm=algorithm, **settings)
    engine = build_engine(config)
    correct(engine, texts_of(requests(), plain(target)), RATE)
    tally = Tally()
    for _ in range(2):
        result = run(engine, requests())
        expected = plain(target).completions
        tally.mismatches += [
            f"{pair}, {shape}, {name}: {completion} instead of {expected[name]}"
            for name, completion in result.completions.items()
            if completion != expected[name]
        ]
        tally += Tally(
            runs=1,
            requests=len(result.completions),
            tokens=sum(map(len, result.tokens.values())),
            accepted=set(result.accept_lens),
            cached=sum(output.cached_tokens for output in result.last.values()),
        )
    return tally
