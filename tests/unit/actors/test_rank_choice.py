"""Where the balancer would send a request, and which of its prompt tokens that rank need not compute."""

from dataclasses import replace

import pytest

from cluster.actors.balance import POLICIES, Balancer, RankChoice
from cluster.request import RequestParams
from tests.unit.actors.test_balance import PAGE, PLENTY, request, run


@pytest.mark.parametrize("policy", POLICIES)
def test_balancer_proposes_the_chosen_rank_without_changing_loads(policy: str) -> None:
    balancer = Balancer(policy, 3, PAGE, index_pages=PLENTY)
    for number in range(20):
        one = request(f"r{number}", 8 + 40 * (number % 4), first=100 * number)
        before = [balancer.load(at) for at in range(3)]
        place = balancer.propose(one, 8.0)
        assert place == balancer.propose(one, 8.0) and [balancer.load(at) for at in range(3)] == before
        assert balancer.choose(one, 8.0, place if number % 2 else None) == place.rank


def test_rank_choice_counts_cached_tokens_of_open_and_finished_prompts() -> None:
    balancer = Balancer("expected_load", 1, PAGE, index_pages=PLENTY)

    def found(tokens: int, **more: object) -> tuple[int, int]:
        place: RankChoice = balancer.propose(request("next", tokens, **more), 8.0)
        return place.cached_tokens, place.shared_tokens

    assert found(41) == (0, 0)
    balancer.choose(request("first", 21), 8.0)
    assert (found(41), found(41, first=1)) == ((20, 20), (0, 0))
    run(balancer, "first")
    assert found(41) == (20, 0), "in the cache, and nobody reads it"
    balancer.choose(request("second", 9), 8.0)
    assert found(41) == (20, 8)
    assert Balancer("expected_load", 1, PAGE, index_pages=0).propose(request("x", 41), 8.0).cached_tokens == 0
    scored = replace(request("scored", 41), params=RequestParams(max_tokens=1, prompt_logprobs=1))
    assert balancer.propose(scored, 8.0).cached_tokens == 0
