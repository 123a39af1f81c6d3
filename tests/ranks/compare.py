"""A gang against one rank: the same requests must get the same tokens, from the same trees, with the same accept
lengths.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from tests.ranks.gang import Action, Case, Life, Ranks
from tests.ranks.worker import run

MESH = (
    *("tp_size", "attn_dp_size", "dp_padding", "vocab_parallel", "speculative_draft_parallel", "debug_lockstep"),
    *("capture", "capture_sizes", "ep_size"),
)
AMPLE = {"max_total_tokens": 16384, "max_running_requests": 32, "capture": "off"}


@dataclass
class Tally:
    """What cases compared, and what they exercised, added up.

    `compared` requests had all their tokens compared, `counted` also their trees and accept lengths, of
    which they were `shown` so many; `aborted` ones a prefix. `scored` ones had their prompts' compared.
    `accepted[j]` are trees of which j draft tokens were accepted; `uneven` steps had ranks with different rows,
    `idle` ranks had none in a step in which others had, `replayed` ones replayed a captured program.
    """

    compared: int = 0
    scored: int = 0
    counted: int = 0
    shown: int = 0
    aborted: int = 0
    retracted: int = 0
    padded: int = 0
    steps: int = 0
    uneven: int = 0
    idle: int = 0
    replayed: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Tally") -> "Tally":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def check(ranks: Ranks, case: Case, same_trees: bool = True, timeout_s: float = 240.0) -> Tally:
    """Run the case on its gang and on one rank, and compare. `same_trees`: trees and accept lengths must agree
    as well.
    """
    lives = ranks.lives(case, timeout_s)
    one = alone(json.dumps(without_mesh(case.config), sort_keys=True), tuple(map(frozen, case.actions)))
    tally = Tally(steps=len(lives[0].rows))
    tokens, ended, retracted = joined(lives)
    trees = {name: drafted for life in lives for name, drafted in life.trees.items()}
    shown = {name: drafted for life in lives for name, drafted in life.shown.items()}
    for action in case.actions:
        if action.kind == "abort":
            continue
        name = action.request["request_id"]
        got, whole = tokens.get(name, []), one.tokens[name]
        if name not in ended:
            tally.aborted += 1
            if got != whole[: len(got)]:
                tally.mismatches.append(f"{name}, aborted: {got} is no prefix of {whole}")
            continue
        (reason, accepted), (true_reason, true_accepted) = ended[name], one.ended[name]
        tally.compared += 1
        if (got, reason) != (whole, true_reason):
            tally.mismatches.append(f"{name}: {got} {reason} instead of {whole} {true_reason}")
        scores = [score for life in lives for score in life.scores.get(name, [])]
        tally.scored += bool(scores)
        if not same_scores(scores, one.scores.get(name, [])):
            tally.mismatches.append(f"{name}: scores {scores} instead of {one.scores.get(name)}")
        drawn = [line for life in lives for line in life.drawn.get(name, [])]
        if not same_scores(drawn, one.drawn.get(name, [])):
            tally.mismatches.append(f"{name}: log-probabilities {drawn} instead of {one.drawn.get(name)}")
        if name in retracted or not same_trees:
            continue
        tally.counted += 1
        tally.shown += len(shown.get(name, ()))
        tally.accepted += Counter(dict(enumerate(accepted or [])))
        if accepted != true_accepted:
            tally.mismatches.append(f"{name}: accept lengths {accepted} instead of {true_accepted}")
        elif json.dumps(shown.get(name)) != json.dumps(one.shown.get(name)):
            tally.mismatches.append(f"{name}: shown other trees, of the same accept lengths {accepted}")
        elif trees.get(name) != one.trees.get(name) and case.config.get("capture") != "on":  # replays draft unseen
            tally.mismatches.append(f"{name}: other trees, of the same accept lengths {accepted}")
    exercised(tally, lives, case)
    return tally


def same_scores(ours: list[list[Any]], theirs: list[list[Any]]) -> bool:
    """Whether tokens have the same log-probabilities; their sums are added up in another order."""

    def names(lines: list[list[Any]]) -> list[Any]:
        return [(token, rank, [of for of, _ in top]) for token, _, rank, top in lines]

    if names(ours) != names(theirs):
        return False
    numbers = ([x for _, own, _, top in lines for x in (own, *(p for _, p in top))] for lines in (ours, theirs))
    return all(abs(a - b) < 1e-9 for a, b in zip(*numbers, strict=True))


def exercised(tally: Tally, lives: list[Life], case: Case) -> None:
    """Add what the ranks went through; hold them to what is true of every life."""
    attn_tp = case.world // int(case.config.get("attn_dp_size", 1))
    logs_agree(lives, attn_tp)
    leaders = lives[::attn_tp]
    tally.retracted += sum(len(life.retracted) for life in leaders)
    tally.padded += sum(life.padded for life in leaders)
    tally.replayed += sum(life.replayed for life in leaders)
    for rows in zip(*(life.rows for life in leaders), strict=True):
        tally.uneven += len(set(rows)) > 1
        tally.idle += sum(n == 0 for n in rows) if any(rows) else 0
    left = [life.pages_used for life in leaders]
    if any(left):
        tally.mismatches.append(f"pages still in use: {left}")


def logs_agree(lives: list[Life], attn_tp: int) -> None:
    """Every rank entered the same collectives of the world, every rank of a group the same ones of the group."""
    for rank, life in enumerate(lives):
        assert life.world_log == lives[0].world_log, f"rank {rank} {life.world_log}, rank 0 {lives[0].world_log}"
        leader = lives[rank // attn_tp * attn_tp]
        assert life.attn_log == leader.attn_log, f"rank {rank} {life.attn_log}, its leader {leader.attn_log}"
        assert len(life.rows) == len(lives[0].rows), "ranks took different numbers of steps"
    if len(lives) > 1:
        assert lives[0].world_log[0] > len(lives[0].rows), "nothing was logged"


def joined(lives: list[Life]) -> tuple[dict[str, list[int]], dict[str, tuple[str, list[int] | None]], set[str]]:
    """Tokens, ends and retracted requests of all ranks."""
    tokens = {name: ids for life in lives for name, ids in life.tokens.items()}
    ended = {name: end for life in lives for name, end in life.ended.items()}
    return tokens, ended, {name for life in lives for name in life.retracted}


def without_mesh(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in MESH} | AMPLE


def frozen(action: Action) -> str:
    return json.dumps(asdict(action), sort_keys=True)


@cache
def alone(config: str, actions: tuple[str, ...]) -> Life:
    """One rank's life with the same requests, none aborted, and enough memory for all of them."""
    todo = [Action(**json.loads(action)) for action in actions]
    submits = [replace(action, dp_rank=0) for action in todo if action.kind == "submit"]
    case = Case(json.loads(config), submits)
    life = run(json.loads(json.dumps(asdict(case))))
    assert not life.retracted, "the reference must not retract"
    return life
