"""The sizes of captured programs: there are few, and every load has a size close to it."""

from itertools import product

import pytest

from cluster.dp_attention.sizes import Buckets, Sizes, max_sizes, sizes_up_to


def test_capture_sizes_are_few_and_end_at_the_largest() -> None:
    assert sizes_up_to(1) == (1,) and sizes_up_to(5) == (1, 2, 3, 4, 5)
    assert sizes_up_to(64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    assert len(sizes_up_to(4096)) == 24


@pytest.mark.parametrize("largest", [1, 7, 48, 100, 512])
def test_buckets_leave_at_most_a_third_of_the_rows_idle(largest: int) -> None:
    buckets = Buckets(sizes_up_to(largest))
    for size in range(1, largest + 1):
        fitted = buckets.fit([Sizes(size, 0, 0)])
        assert fitted is not None and size <= fitted.decodes < 1.5 * size
        assert buckets.fit([fitted]) == fitted
    for rows, finals in product(range(1, min(largest, 100)), range(20)):
        for load in (Sizes(0, rows, finals), Sizes(5, rows, finals)) if finals <= rows else ():
            program_sizes = buckets.fit([load])
            assert program_sizes is None or 3 * (program_sizes.prompt_rows - rows) <= program_sizes.prompt_rows
            assert (
                program_sizes is None or program_sizes.finishing_prompts == finals or program_sizes.prompt_rows > rows
            ), "an idle finishing prompt needs an idle row"


def test_sizes_beyond_the_largest_bucket_do_not_fit() -> None:
    assert Buckets((2, 4)).fit([Sizes(3, 0, 0)]) == (4, 0, 0)
    assert Buckets((2, 4)).fit([Sizes(1, 4, 1)]) is None, "no idle row for an idle finishing prompt"
    for load in (Sizes(5, 0, 0), Sizes(1, 5, 1), Sizes(1, 5, 5)):
        assert Buckets((2, 4)).fit([load]) is None
        assert Buckets().fit([load]) == load


def test_captured_steps_have_only_the_chunks_of_prompts_that_recur() -> None:
    """No prompt ends in a captured step: the size of its last chunk depends on its length, so it does not recur."""
    fixed_chunks, any_chunks, no_prompts = Buckets(chunk_sizes=(4, 8)), Buckets(), Buckets(allow_prompts=False)
    for load in (Sizes(3, 0, 0), Sizes(3, 8, 0), Sizes(0, 4, 0), Sizes(3, 5, 0), Sizes(3, 8, 1)):
        recurs = not load.prompt_rows or (load.prompt_rows in (4, 8) and not load.finishing_prompts)
        assert fixed_chunks.can_hold(load, 4) is recurs and any_chunks.can_hold(load, 4)
        assert no_prompts.can_hold(load, 4) is (load.prompt_rows == 0)
    assert not Buckets(max_rows=19, chunk_sizes=(4, 8)).can_hold(Sizes(3, 8, 0), 4)


def test_group_without_a_finishing_prompt_gets_an_idle_row_in_a_shared_program() -> None:
    buckets = Buckets((1, 2, 4, 8, 16))
    assert buckets.fit([Sizes(1, 8, 1), Sizes(3, 2, 2)]) == (4, 16, 2)
    assert buckets.fit([Sizes(1, 8, 2), Sizes(3, 2, 1)]) == (4, 8, 2)
    assert Buckets().fit([Sizes(0, 5, 1), Sizes(0, 5, 0)]) == (0, 6, 1)
    assert Buckets().fit([Sizes(0, 5, 1), Sizes(2, 4, 0)]) == (2, 5, 1)


def test_padded_ranges_map_each_request_count_to_one_size() -> None:
    buckets = Buckets((1, 2, 4, 8))
    spans = buckets.padded_ranges()
    assert [list(span) for span in spans] == [[1], [2], [3, 4], [5, 6, 7, 8]]
    for span in spans:
        assert {buckets.fit([Sizes(count, 0, 0)]) for count in span} == {Sizes(span[-1], 0, 0)}


def test_max_sizes_takes_the_maximum_of_each_field() -> None:
    assert max_sizes([Sizes(1, 9, 0), Sizes(4, 2, 2)]) == (4, 9, 2)
