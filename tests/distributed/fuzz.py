"""Fuzzes the lockstep of a gang with random cases, each of which depends on its seed and mesh alone. To repeat a case:

python -m tests.distributed.fuzz --tp 2 --dp 2 --seed 17
"""

import argparse
import sys
import time
from random import Random
from typing import Any

from tests.distributed.compare import Tally, check, tally_reports
from tests.distributed.gang import Case, RankProcesses, RankReport
from tests.distributed.workload import workload
from tests.parity.harness import VOCAB
from tests.parity.pairs import draft_of
from tests.support.families import family_checkpoint
from tests.support.tiny_checkpoints import draft_folder, target_folder

CASE_TIMEOUT_S = 240.0
HORIZON = 120  # steps in which requests arrive


def random_case(seed: int, tp: int, dp: int) -> Case:
    """The case of a seed: random settings, and arrivals in bursts with quiet stretches between them.

    Tiers and chunk sizes change every step. Every third seed has expert parallelism.
    """
    random = Random(f"{seed} {tp} {dp}")
    target_path = target_folder(vocab_size=VOCAB, layers=3)
    config: dict[str, Any] = {
        "model_path": target_path,
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
            "speculative_draft_model_path": draft_folder(target_path),
            "speculative_draft_parallel": random.choice(("sharded", "sharded", "replicated")),
            "speculative_eagle_topk": random.choice((1, 2, 3)),
            "speculative_num_steps": random.choice((1, 2, 3)),
            "speculative_mode": Random(f"trees {seed} {tp} {dp}").choice(("adaptive", "fixed")),
        }
    elif Random(f"n-gram {seed} {tp} {dp}").random() < 0.8:
        config |= {"speculative_algorithm": "NGRAM", "speculative_num_steps": 1 + seed % 4}
    if seed % 3 == 2:
        config |= expert_settings(config, Random(f"experts {seed} {tp} {dp}"))
    idle_ranks = tuple(rank for rank in range(dp) if random.random() < 0.25)
    actions = workload(
        seed,
        dp,
        random.randint(HORIZON // 6, HORIZON // 3) * dp,
        vocab=VOCAB,
        horizon=HORIZON,
        max_new_tokens=20,
        idle_ranks=idle_ranks if len(idle_ranks) < dp else (),
        abort_share=0.2,
        skew=random.choice((1.0, 2.0, 5.0)),
    )
    return Case(config, actions, shaken=seed)


def expert_settings(config: dict[str, Any], random: Random) -> dict[str, Any]:
    """Settings for expert parallelism with a target of five experts. If `config` has a draft, the draft is one with
    eight experts of its own or an EAGLE-3 draft.
    """
    ep_sizes = [size for size in (2, 4) if config["tp_size"] % size == 0]
    target = family_checkpoint("mixtral", "three of five, window of 8").folder
    settings: dict[str, Any] = {"model_path": target, "ep_size": random.choice(ep_sizes)}
    if "speculative_draft_model_path" in config:
        algorithm, draft = ("NEXTN", draft_of("nextn-sparse")), ("EAGLE3", draft_folder(target))
        settings["speculative_algorithm"], settings["speculative_draft_model_path"] = random.choice((algorithm, draft))
    return settings


def fuzz(ranks: RankProcesses, dp: int, steps: int, first_seed: int, compare_every: int = 4) -> Tally:
    """Run the cases of the seeds `first_seed`, `first_seed + 1`, .. until the gang has taken `steps` steps; return the
    sum of their tallies. Every `compare_every`-th case is compared with a single rank.

    Raises:
        AssertionError: ranks did not stay in step, lost pages, hung, or gave other tokens. The message has the command
            that repeats the case.
    """
    total, seed = Tally(), first_seed
    while total.steps < steps:
        try:
            total += run_case(ranks, seed, dp, compare=(seed - first_seed) % compare_every == 0)
        except (AssertionError, TimeoutError) as error:
            replay = f"python -m tests.distributed.fuzz --tp {ranks.world_size} --dp {dp} --seed {seed}"
            raise AssertionError(f"{error}\nto repeat this case: {replay}") from error
        seed += 1
    return total


def run_case(ranks: RankProcesses, seed: int, dp: int, compare: bool) -> Tally:
    """Run the case of a seed and return its tally. With `compare` the case is compared with a single rank."""
    case = random_case(seed, ranks.world_size, dp)
    if compare:
        tally = check(ranks, case, same_trees=False, timeout_s=CASE_TIMEOUT_S)
    else:
        reports: list[RankReport] = ranks.run_without_failure(case, CASE_TIMEOUT_S)
        tally = Tally(steps=len(reports[0].rows))
        tally_reports(tally, reports, case)
        aborted_ids = {a.request["request_id"] for a in case.actions if a.kind == "abort"}
        ended_ids = {name for report in reports for name in report.ended}
        request_ids = {a.request["request_id"] for a in case.actions}
        assert request_ids - aborted_ids <= ended_ids, (
            f"these requests never ended: {request_ids - aborted_ids - ended_ids}"
        )
    assert not tally.mismatches, tally.mismatches
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1, help="go on with the next seeds until so many steps are taken")
    args = parser.parse_args()
    started_at = time.monotonic()
    with RankProcesses(args.tp) as ranks:
        total = fuzz(ranks, args.dp, args.steps, args.seed, compare_every=1 if args.steps == 1 else 4)
    print(f"{total} in {time.monotonic() - started_at:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
