"""Every target family with every draft: who can be paired with whom, and law 1 on a pair."""

from dataclasses import dataclass, field
from functools import cache

import torch

from cluster.arch import DraftSpec, read_target
from cluster.config import ConfigError
from cluster.engine import build_engine
from cluster.request import Request
from tests.families import FAMILIES, LAYERS, VOCAB, made
from tests.loading import check_draft
from tests.parity.drafts import correct
from tests.parity.harness import SAMPLING, Run, config_of, request, run, run_alone, texts_of
from tests.unit.models.draft_cases import CASES, LISTS

DEEP = 8
"""Target layers of drafts whose aux layers are EAGLE-3's default ones, which ascend from 8 layers on."""
DRAFTS = (*CASES, *LISTS)
SHAPES = {"chain": (1, 3), "tree": (3, 3)}
"""(topk, num_steps)."""
PAGES, CHUNKS = (4, 1, 16), (16, 7, -1)
RATE = 0.75


@dataclass(frozen=True)
class Pair:
    """A target family and a draft; `turn` picks the family's config, page size and chunks, and chain or tree."""

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
        return made(self.family, self.case, self.layers).folder

    def spec(self) -> DraftSpec:
        """The draft as it is read for this target, every tensor accounted for.

        Raises:
            ConfigError: they cannot be paired.
        """
        return check_draft(draft_of(self.draft), read_target(self.target))

    def __str__(self) -> str:
        return f"{self.family} ({self.case}) with {self.draft}"


@dataclass
class Tally:
    """What runs compared, added up; `accepted` are the accept lengths that occurred."""

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
    """The product; turns differ from draft to draft, so that each family's configs take turns."""
    return [Pair(family, draft, f + d) for f, family in enumerate(FAMILIES) for d, draft in enumerate(DRAFTS)]


def diagonal() -> list[Pair]:
    """Each draft once, and each family at least once; families in their first config."""
    families = list(FAMILIES)
    return [Pair(families[d % len(families)], draft, 0) for d, draft in enumerate(DRAFTS)]


def refused(pair: Pair) -> str:
    """Why a pair cannot be paired; empty if it can."""
    try:
        pair.spec()
    except ConfigError as error:
        return str(error)
    return ""


@cache
def draft_of(name: str) -> str:
    """The folder of a draft, made once."""
    return (LISTS[name] if name in LISTS else CASES[name]).folder()


def algorithm_of(spec: DraftSpec) -> str:
    """The `speculative_algorithm` of a draft."""
    return {"eagle3": "EAGLE3", "mtp": "NEXTN"}.get(spec.kind, "EAGLE")


def requests() -> list[Request]:
    """Greedy and sampled ones; texts cross pages of 4 and of 16, `c` shares 20 tokens with `a`, `e` may end early."""

    def prompt(length: int, seed: int = 1) -> list[int]:
        return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    whole = {"max_tokens": 14, "ignore_eos": True}
    return [
        request("a", prompt(33), SAMPLING["greedy"], **whole),
        request("b", prompt(7, 2), SAMPLING["0.8"], seed=3, **whole),
        request("c", [*prompt(33)[:20], *prompt(9, 3)], SAMPLING["filtered"], seed=4, **whole),
        request("d", prompt(1), SAMPLING["greedy"], **whole),
        request("e", prompt(15, 4), SAMPLING["0.8"], seed=5, max_tokens=18),
    ]


@cache
def plain(target: str) -> Run:
    """Plain decoding of the requests, each alone and without prefix reuse: the oracle."""
    return run_alone(build_engine(config_of(target, disable_radix_cache=True)), requests())


def check(pair: Pair, shape: str) -> Tally:
    """Run the requests together, then again from cached pages, and compare them with plain decoding.

    The draft is the real one, its forwards and its KV too; its finished trees are told the truth at `RATE`, or a
    random draft would be right once in `VOCAB` times.
    """
    target, algorithm = pair.target, algorithm_of(pair.spec())
    settings = {"page_size": PAGES[pair.turn % 3], "chunked_prefill_size": CHUNKS[pair.turn // 3 % 3]}
    topk, steps = SHAPES[shape]
    config = config_of(target, draft_of(pair.draft), topk, steps, speculative_algorithm=algorithm, **settings)
    engine = build_engine(config)
    correct(engine, texts_of(requests(), plain(target)), RATE)
    tally = Tally()
    for _ in range(2):
        result = run(engine, requests())
        right = plain(target).ended
        tally.mismatches += [
            f"{pair}, {shape}, {name}: {ended} instead of {right[name]}"
            for name, ended in result.ended.items()
            if ended != right[name]
        ]
        tally += Tally(
            runs=1,
            requests=len(result.ended),
            tokens=sum(map(len, result.tokens.values())),
            accepted=set(result.accept_lens),
            cached=sum(output.cached_tokens for output in result.last.values()),
        )
    return tally
