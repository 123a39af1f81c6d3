"""Lockstep fuzz: random lives of a gang, each made by its seed alone. To see one again:

python -m tests.ranks.fuzz --tp 2 --dp 2 --seed 17
"""

import argparse
import sys
import time
from random import Random
from typing import Any

from tests.families import made
from tests.parity.harness import VOCAB
from tests.parity.pairs import draft_of
from tests.ranks.compare import Tally, check, exercised
from tests.ranks.gang import Case, Life, Ranks
from tests.ranks.workload import workload
from tests.tiny import draft_folder, target_folder

LIFE_TIMEOUT_S = 240.0
HORIZON = 120  # steps in which requests arrive


def life(seed: int, tp: int, dp: int) -> Case:
    """Random settings, and arrivals in bursts with quiet stretches between; tiers and chunk sizes change every step.
    Every third life has experts that are apart.
    """
    random = Random(f"{seed} {tp} {dp}")
    target = target_folder(vocab_size=VOCAB, layers=3)
    config: dict[str, Any] = {
        "model_path": target,
        "dtype": "float64",
        "device": "cpu",
        "num_threads": 1,
        "tp_size": tp,
        "attn_dp_size": dp,
        "max_running_requests": random.choice((2, 4, 8)),
        "max_total_tokens": random.choice((96, 96, 160, 2048)),
        "page_size": random.choice((1, 4, 16)),
        "disable_radix_cache": random.random() < 0.2,
        "dp_padding": random.choice(("padded", "exact")),
        "vocab_parallel": random.choice(("attention", "world")),
        "debug_lockstep": random.random() < 0.3,
    }
    if random.random() < 0.9:
        config |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": draft_folder(target),
            "speculative_draft_parallel": random.choice(("sharded", "sharded", "replicated")),
            "speculative_eagle_topk": random.choice((1, 2, 3)),
            "speculative_num_steps": random.choice((1, 2, 3)),
        }
    if seed % 3 == 2:
        config |= experts(config, Random(f"experts {seed} {tp} {dp}"))
    idle = tuple(rank for rank in range(dp) if random.random() < 0.25)
    actions = workload(
        seed,
        dp,
        random.randint(HORIZON // 6, HORIZON // 3) * dp,
        vocab=VOCAB,
        horizon=HORIZON,
        most_tokens=20,
        idle=idle if len(idle) < dp else (),
        aborts=0.2,
        skew=random.choice((1.0, 2.0, 5.0)),
    )
    return Case(config, actions, shaken=seed)


def experts(config: dict[str, Any], random: Random) -> dict[str, Any]:
    """Five experts in parts, and, where there is a draft, sometimes one with eight of its own."""
    parts = [size for size in (2, 4) if config["tp_size"] % size == 0]
    target = made("mixtral", "three of five, window of 8").folder
    given: dict[str, Any] = {"model_path": target, "ep_size": random.choice(parts)}
    if "speculative_draft_model_path" in config:
        algorithm, draft = ("NEXTN", draft_of("nextn-sparse")), ("EAGLE3", draft_folder(target))
        given["speculative_algorithm"], given["speculative_draft_model_path"] = random.choice((algorithm, draft))
    return given


def fuzz(ranks: Ranks, dp: int, steps: int, first_seed: int, compare_every: int = 4) -> Tally:
    """Lives of seeds `first_seed`, .. until so many steps were taken; every so many lives against one rank.

    Raises:
        AssertionError: ranks did not stay in step, lost pages, hung, or gave other tokens; with what replays it.
    """
    total, seed = Tally(), first_seed
    while total.steps < steps:
        try:
            total += run_life(ranks, seed, dp, compare=(seed - first_seed) % compare_every == 0)
        except (AssertionError, TimeoutError) as error:
            replay = f"python -m tests.ranks.fuzz --tp {ranks.world} --dp {dp} --seed {seed}"
            raise AssertionError(f"{error}\nto see it again: {replay}") from error
        seed += 1
    return total


def run_life(ranks: Ranks, seed: int, dp: int, compare: bool) -> Tally:
    case = life(seed, ranks.world, dp)
    if compare:
        tally = check(ranks, case, same_trees=False, timeout_s=LIFE_TIMEOUT_S)
    else:
        lives: list[Life] = ranks.lives(case, LIFE_TIMEOUT_S)
        tally = Tally(steps=len(lives[0].rows))
        exercised(tally, lives, case)
        aborted = {a.request["request_id"] for a in case.actions if a.kind == "abort"}
        ended = {name for each in lives for name in each.ended}
        asked = {a.request["request_id"] for a in case.actions}
        assert asked - aborted <= ended, f"never ended: {asked - aborted - ended}"
    assert not tally.mismatches, tally.mismatches
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1, help="go on with the next seeds until so many steps were taken")
    args = parser.parse_args()
    began = time.monotonic()
    with Ranks(args.tp) as ranks:
        total = fuzz(ranks, args.dp, args.steps, args.seed, compare_every=1 if args.steps == 1 else 4)
    print(f"{total} in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
