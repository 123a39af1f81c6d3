"""The rank that the balancer proposes for a request, and how many of its prompt tokens that rank need not compute."""

from dataclasses import replace

import pytest

from cluster.actors.balance import POLICIES, Balancer
from cluster.actors.open_requests import RankChoice
from cluster.request import RequestParams
from tests.unit.actors.test_balance import AMPLE_PAGES, PAGE, request, run_to_end


@pytest.mark.parametrize("policy", POLICIES)
def test_balancer_proposes_the_chosen_rank_without_changing_loads(policy: str) -> None:
    balancer = Balancer(policy, 3, PAGE, index_pages=AMPLE_PAGES)
    for number in range(20):
        new_request = request(f"r{number}", 8 + 40 * (number % 4), first=100 * number)
        loads_before = [balancer.load(rank) for rank in range(3)]
        choice = balancer.propose(new_request.request, 8.0)
        assert (
            choice == balancer.propose(new_request.request, 8.0)
            and [balancer.load(rank) for rank in range(3)] == loads_before
        )
        assert balancer.choose(new_request, 8.0, choice if number % 2 else None) == choice.rank


def test_rank_choice_counts_cached_tokens_of_open_and_finished_prompts() -> None:
    balancer = Balancer("expected_load", 1, PAGE, index_pages=AMPLE_PAGES)

    def cached_and_shared_tokens(tokens: int, **fields: object) -> tuple[int, int]:
        choice: RankChoice = balancer.propose(request("next", tokens, **fields).request, 8.0)
        return choice.cached_tokens, choice.shared_tokens

    assert cached_and_shared_tokens(41) == (0, 0)
    balancer.choose(request("first", 21), 8.0)
    assert (cached_and_shared_tokens(41), cached_and_shared_tokens(41, first=1)) == ((20, 20), (0, 0))
    run_to_end(balancer, "first")
    assert cached_and_shared_tokens(41) == (20, 0), "the prefix is cached, but no open request shares it"
    balancer.choose(request("second", 9), 8.0)
    assert cached_and_shared_tokens(41) == (20, 8)
    assert Balancer("expected_load", 1, PAGE, index_pages=0).propose(request("x", 41).request, 8.0).cached_tokens == 0
    scored = replace(request("scored", 41).request, params=RequestParams(max_tokens=1, prompt_logprobs=1))
    assert balancer.propose(scored, 8.0).cached_tokens == 0
