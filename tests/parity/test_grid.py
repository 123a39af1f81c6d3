"""Law 1 over a grid: every speculative configuration gives the tokens of plain decoding, to the last one."""

from dataclasses import astuple

import pytest

from tests.pairwise import assert_covering
from tests.parity.grid import AXES, Case, cases, check
from tests.parity.harness import SAMPLING, grid_requests, plain_run


@pytest.mark.parametrize(("strength", "most"), [(2, 30), (3, 120)])
def test_grid_cases_cover_all_value_combinations(strength: int, most: int) -> None:
    rows = [astuple(case) for case in cases(strength)]
    assert_covering(rows, list(AXES.values()), strength)
    assert len(rows) <= most


@pytest.mark.parametrize("part", range(4))
def test_all_pairs_of_grid_values_match_plain_decoding(part: int) -> None:
    checked = [check(case) for case in cases(2)[part::4]]
    assert not [line for one in checked for line in one.mismatches]


@pytest.mark.parametrize("page_size", AXES["page_size"])
def test_scarce_kv_memory_causes_retraction_and_keeps_tokens(page_size: int) -> None:
    """The first request is admitted beside others, then pages run out."""
    for topk, num_steps, sampling in ((1, 3, "greedy"), (4, 3, "0.8")):
        checked = check(Case(topk, num_steps, page_size, 8, -1, 3, sampling, "model", "scarce"))
        assert checked.retracted > 0
        assert not checked.mismatches


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_steps", AXES["num_steps"])
def test_all_triples_of_grid_values_match_plain_decoding(num_steps: int) -> None:
    """The product has 93,312 cases. Faults that only one case of it would show are beyond this test."""
    checked = [check(case) for case in cases(3) if case.num_steps == num_steps]
    assert not [line for one in checked for line in one.mismatches]
    assert sum(one.retracted for one in checked) > 0
    assert sum(one.cached_tokens for one in checked) > 0
    seen = set().union(*(one.accept_lens for one in checked))
    assert seen == set(range(1, num_steps + 2)), "not every accept length occurred"


def test_plain_outputs_differ_by_request_and_temperature() -> None:
    """They differ between requests and temperatures, and some end early with EOS."""
    for sampling in SAMPLING:
        plain = plain_run(sampling)
        assert len({tuple(tokens) for tokens in plain.tokens.values()}) == 8
        assert {output.finish_reason for output in plain.last.values()} == {"stop", "length"}
        assert all(len(plain.tokens[r.request_id]) <= r.params.max_tokens for r in grid_requests(sampling, 8))
    assert plain_run("greedy").tokens != plain_run("0.8").tokens


def test_fp8_cache_outputs_differ_from_unquantised_cache_outputs() -> None:
    """Its outputs are not those of a cache of numbers: a case that took one for the other would be seen."""
    for sampling in SAMPLING:
        assert plain_run(sampling, "fp8_e4m3").tokens != plain_run(sampling, "auto").tokens
