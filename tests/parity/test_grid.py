"""Law 1 over the product grid: every speculative configuration gives plain decoding's tokens, to the last one."""

from itertools import combinations, product

import pytest

from tests.parity.grid import AXES, EXTRAS, Case, check, covering, full_product
from tests.parity.harness import SAMPLING, grid_requests, plain_run

COVERING = [case for seed in (0, 1, 2) for case in covering(seed)]
PRODUCT = full_product()


@pytest.mark.parametrize("part", range(6))
def test_a_covering_part_of_the_grid_equals_plain_decoding(part: int) -> None:
    checked = [check(case) for case in COVERING[part::6]]
    assert not [line for one in checked for line in one.mismatches]


def test_the_covering_part_holds_every_pair_of_values() -> None:
    axes = list((AXES | EXTRAS).items())
    for (a, values), (b, others) in combinations(axes, 2):
        seen = {(getattr(case, a), getattr(case, b)) for case in COVERING}
        assert seen == set(product(values, others)), f"{a} and {b}"
    assert 60 <= len(COVERING) <= 100


def test_the_product_is_whole() -> None:
    assert len({(c.topk, c.num_steps, c.page_size, c.batch, c.chunk, c.num_aux, c.sampling) for c in PRODUCT}) == 3888


@pytest.mark.parametrize("page_size", AXES["page_size"])
def test_scarce_memory_really_retracts(page_size: int) -> None:
    """The first request is admitted beside others, then pages run out."""
    for topk, num_steps, sampling in ((1, 3, "greedy"), (4, 3, "0.8")):
        checked = check(Case(topk, num_steps, page_size, 8, -1, 3, sampling, "model", "scarce"))
        assert checked.retracted > 0
        assert not checked.mismatches


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_steps", AXES["num_steps"])
@pytest.mark.parametrize("topk", AXES["topk"])
def test_the_whole_product_equals_plain_decoding(topk: int, num_steps: int) -> None:
    checked = [check(case) for case in PRODUCT if (case.topk, case.num_steps) == (topk, num_steps)]
    assert len(checked) == 243
    assert not [line for one in checked for line in one.mismatches]
    assert sum(one.retracted for one in checked) > 0
    assert sum(one.cached_tokens for one in checked) > 0
    seen = set().union(*(one.accept_lens for one in checked))
    assert seen == set(range(1, num_steps + 2)), "not every accept length occurred"


def test_plain_outputs_are_worth_comparing() -> None:
    """They differ between requests and temperatures, and some end early with EOS."""
    for sampling in SAMPLING:
        plain = plain_run(sampling)
        assert len({tuple(tokens) for tokens in plain.tokens.values()}) == 8
        assert {output.finish_reason for output in plain.last.values()} == {"stop", "length"}
        assert all(len(plain.tokens[r.request_id]) <= r.params.max_tokens for r in grid_requests(sampling, 8))
    assert plain_run("greedy").tokens != plain_run("0.8").tokens


def test_a_cache_in_fp8_is_another_target() -> None:
    """Its outputs are not those of a cache of numbers: a case that took one for the other would be seen."""
    for sampling in SAMPLING:
        assert plain_run(sampling, "fp8_e4m3").tokens != plain_run(sampling, "auto").tokens
