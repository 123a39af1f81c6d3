"""Law 1 over a grid of configurations: each speculative configuration gives exactly the tokens of plain decoding."""

from dataclasses import astuple

import pytest

from cluster.config.resolved import DEFAULT_LOOKUP_TOKENS
from tests.parity.grid import AXES, Case, cases, check
from tests.parity.harness import SAMPLING, grid_requests, plain_run
from tests.support.pairwise import assert_covering


@pytest.mark.parametrize(("strength", "most"), [(2, 30), (3, 120)])
def test_grid_cases_cover_all_value_combinations(strength: int, most: int) -> None:
    rows = [astuple(case) for case in cases(strength)]
    assert_covering(rows, list(AXES.values()), strength)
    assert len(rows) <= most


@pytest.mark.parametrize("part", range(4))
def test_all_pairs_of_grid_values_match_plain_decoding(part: int) -> None:
    case_results = [check(case) for case in cases(2)[part::4]]
    assert not [line for case_result in case_results for line in case_result.mismatches]


@pytest.mark.parametrize("page_size", AXES["page_size"])
def test_scarce_kv_memory_causes_retraction_and_keeps_tokens(page_size: int) -> None:
    """Several requests are admitted together, then the pages run out."""
    for topk, num_steps, sampling in ((1, 3, "greedy"), (4, 3, "0.8")):
        case_result = check(Case(topk, num_steps, page_size, 8, -1, 3, sampling, "model", "scarce"))
        assert case_result.retracted > 0
        assert not case_result.mismatches


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_steps", AXES["num_steps"])
def test_all_triples_of_grid_values_match_plain_decoding(num_steps: int) -> None:
    """The full product has 93,312 cases. A fault that needs a combination of more than three values can be missed."""
    case_results = [check(case) for case in cases(3) if case.num_steps == num_steps]
    assert not [line for case_result in case_results for line in case_result.mismatches]
    assert sum(case_result.retracted for case_result in case_results) > 0
    assert sum(case_result.cached_tokens for case_result in case_results) > 0
    fixed, adaptive = (
        set[int]().union(*(each.accept_lens for each in case_results if each.case.trees == trees))
        for trees in AXES["trees"]
    )
    assert fixed == set(range(1, num_steps + 2)), "not every accept length occurred"
    assert max(adaptive) <= DEFAULT_LOOKUP_TOKENS + 1, "looked-up tokens may make a tree deeper"


def test_plain_outputs_differ_by_request_and_temperature() -> None:
    """The outputs of plain decoding differ between requests and temperatures, and some end early with EOS."""
    for sampling in SAMPLING:
        plain = plain_run(sampling)
        assert len({tuple(tokens) for tokens in plain.tokens.values()}) == 8
        assert {output.finish_reason for output in plain.last.values()} == {"stop", "length"}
        assert all(len(plain.tokens[r.request_id]) <= r.params.max_tokens for r in grid_requests(sampling, 8))
    assert plain_run("greedy").tokens != plain_run("0.8").tokens


def test_fp8_cache_outputs_differ_from_unquantised_cache_outputs() -> None:
    """So a grid case that used the wrong kind of cache would give a mismatch."""
    for sampling in SAMPLING:
        assert plain_run(sampling, "fp8_e4m3").tokens != plain_run(sampling, "auto").tokens
