"""The routing simulation: all policies serve the same load, times match hand-computed costs, and
`expected_load` gains.
"""

from dataclasses import replace

import pytest

from cluster.actors.balance import POLICIES
from tests.unit.actors.simulated_routing import KV_S, ROW_S, STEP_S, Row, Skew, compare, load_of

SMALL = Skew(requests=150)
PAIR = ("expected_load", "round_robin")


def by_policy(seed: int, skew: Skew = SMALL) -> dict[str, Row]:
    return {row.policy: row for row in compare(seed, skew, PAIR)}


def test_simulation_gives_the_same_rows_for_the_same_seed() -> None:
    skew = replace(SMALL, requests=20)
    rows = compare(3, skew)
    assert rows == compare(3, skew) != compare(4, skew)
    assert [row.policy for row in rows] == list(POLICIES)


def test_simulated_load_has_the_stated_skew() -> None:
    skew = Skew()
    jobs = load_of(0, skew)
    assert len({job.request.request_id for job in jobs}) == len(jobs) == skew.requests
    assert [job.arrives for job in jobs] == sorted(job.arrives for job in jobs)
    long = [job for job in jobs if len(job.request.prompt_token_ids) >= skew.long_tokens[0]]
    assert 0.02 < len(long) / len(jobs) < 0.09
    outputs = [job.output for job in jobs]
    assert not any(skew.short_output[1] < output < skew.chatty_output[0] for output in outputs)
    heads = [job.request.prompt_token_ids[: skew.prefix_tokens[0]] for job in jobs]
    assert len(set(heads)) <= skew.prefixes + len(long)
    assert 0.3 < sum(job.odds == skew.hard_odds for job in jobs) / len(jobs) < 0.5


def test_simulated_request_takes_the_sum_of_the_stated_costs() -> None:
    """A prompt of 100 tokens in chunks of 40 takes three steps and gives the first token. The other two tokens take two
    steps, because no drafted level is ever accepted.
    """
    skew = Skew(
        requests=1, chunk_rows=40, prefix_tokens=(60, 60), own_tokens=(40, 40), long_share=0.0, chatty_share=0.0,
        short_output=(3, 3), hard_share=1.0, hard_odds=0.0, tree_nodes=8,
    )  # fmt: skip
    first_token_s = 3 * STEP_S + 100 * ROW_S
    total_s = first_token_s + 2 * STEP_S + 2 * 8 * ROW_S + (101 + 102) * KV_S
    for row in compare(0, skew):
        assert row.mean_first_s == row.p99_first_s == pytest.approx(first_token_s)
        assert row.mean_s == row.p99_s == pytest.approx(total_s)
        assert (row.imbalance, row.prefix_hits) == (pytest.approx(skew.ranks), 0.0)


def test_simulation_finds_repeated_prompts_in_the_cache() -> None:
    """All prompts share one prefix, and one request runs at a time. All requests except the first of each rank find 99
    cached pages of the prefix. (The 100th page never matches: its key includes the token after it, which differs.)
    """
    skew = Skew(
        ranks=2, requests=50, arrivals_s=0.05, prefixes=1, prefix_tokens=(1600, 1600), own_tokens=(16, 16),
        long_share=0.0,
    )  # fmt: skip
    rows = by_policy(0, skew)
    assert rows["round_robin"].prefix_hits == pytest.approx(48 / 50 * 1584 / 1616)
    assert rows["expected_load"].prefix_hits == pytest.approx(49 / 50 * 1584 / 1616)


@pytest.mark.parametrize("seed", range(3))
def test_expected_load_policy_beats_round_robin(seed: int) -> None:
    rows = by_policy(seed)
    expected_load, round_robin = rows["expected_load"], rows["round_robin"]
    assert expected_load.mean_s < 0.95 * round_robin.mean_s
    assert expected_load.p99_s < 0.97 * round_robin.p99_s
    assert expected_load.mean_first_s < 0.9 * round_robin.mean_first_s
    assert expected_load.prefix_hits > round_robin.prefix_hits + 0.03


def test_expected_load_beats_round_robin_without_shared_prefixes() -> None:
    """Without shared prefixes only the balance of load can make a difference."""
    gains = []
    for seed in range(3):
        rows = by_policy(seed, replace(SMALL, prefix_tokens=(0, 0), own_tokens=(64, 1536)))
        gains.append(rows["expected_load"].mean_s / rows["round_robin"].mean_s)
        assert rows["expected_load"].prefix_hits == 0.0
    assert sum(gains) / len(gains) < 0.97
