"""The chooser by Triton equals its twin."""

from dataclasses import replace

import pytest
import torch

from cluster.forward.chooser import TORCH
from cluster.forward.triton_chooser import TritonChooser
from cluster.spec.tree import FLOOR
from tests.unit.forward.test_c_chooser import DTYPES, draw_of, logits_of, unfiltered
from tests.unit.forward.test_choose import mixed

NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}
OWN = TritonChooser()


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.forward.triton_chooser.COLUMNS", 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 64, 129, 1000])
@pytest.mark.parametrize("noisy", [False, True])
def test_what_is_best(noisy: bool, vocab: int, dtype: torch.dtype) -> None:
    logits, draw = logits_of(6, vocab, dtype), draw_of(unfiltered(2, dtype), 3, vocab, dtype)
    draws = [draw if noisy else replace(draw, noise=None)]
    near, every = NEAR[dtype], TORCH.found(logits, draws, None, vocab)
    columns, score = OWN.best(logits, draws, None)
    assert torch.allclose(score, every[0][:, 0], rtol=near, atol=near)
    for count in {min(count, vocab) for count in (1, 5)}:
        scores, columns, total = OWN.found(logits, draws, None, count)
        assert torch.allclose(scores, every[0][:, :count], rtol=near, atol=near)
        by_column = torch.empty_like(every[0]).scatter_(1, every[1], every[0])
        assert torch.allclose(by_column.gather(1, columns), scores, rtol=near, atol=near)
        assert all(len(set(row)) == count for row in columns.tolist())
        assert torch.allclose(total, every[2], rtol=near, atol=near)
        likely, again = OWN.likeliest(logits, draws, None, count)
        assert torch.equal(again, columns) and torch.allclose(likely, scores - total, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_filters_keep_what_they_keep_for_the_twin(dtype: torch.dtype) -> None:
    sampling, vocab = mixed(dtype), 500
    logits, draw = logits_of(24, vocab, dtype), draw_of(sampling, 4, vocab, dtype)
    for least in (None, logits_of(24, vocab, dtype).topk(9).values[:, 8:]):
        columns, score = OWN.best(logits, [draw], least)
        wanted, best = TORCH.best(logits, [draw], least)
        assert torch.equal(columns, wanted)
        assert torch.allclose(score, best, rtol=NEAR[dtype], atol=NEAR[dtype])
        likely, columns = OWN.likeliest(logits, [draw], least, 8)
        twin, wanted = TORCH.likeliest(logits, [draw], least, 8)
        assert ((columns == wanted) | (twin < FLOOR)).all()
        assert torch.allclose(likely, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_several_kinds_of_requests(dtype: torch.dtype) -> None:
    """Trees, then the ends of prompts, as in a step."""
    logits, vocab = logits_of(9, 200, dtype), 200
    draws = [draw_of(unfiltered(2, dtype), 3, vocab, dtype), draw_of(unfiltered(3, dtype), 1, vocab, dtype)]
    assert torch.equal(OWN.best(logits, draws, None)[0], TORCH.best(logits, draws, None)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_numbers_that_are_not_finite(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor(
        [[1, 3, 3, 2], [0, 0, 0, 0], [-inf, -inf, 2, -inf], [5, nan, 1, 5], [5, 1, inf, 5]], dtype=dtype
    )
    draws = [draw_of(replace(unfiltered(5, dtype), noisy=False), 1, 4, dtype)]
    draws = [replace(draws[0], noise=None)]
    columns, score = OWN.best(rows, draws, None)
    assert columns.tolist() == [1, 0, 2, 1, 2]
    assert score.isfinite().tolist() == [True, True, True, False, False]
    likely, columns = OWN.likeliest(rows, draws, None, 3)
    assert likely[3:].isnan().all() and columns[3:].tolist() == [[0, 1, 2]] * 2
    assert columns[:3].tolist() == [[1, 2, 3], [0, 1, 2], [2, 0, 1]]


def test_noise_for_other_columns_or_rows_is_refused() -> None:
    """A program would read whatever lies behind it."""
    draw = draw_of(unfiltered(2, torch.float32), 3, 50, torch.float32)
    with pytest.raises(ValueError, match="noise of 50 tokens for 60 columns"):
        OWN.best(logits_of(6, 60, torch.float32), [draw], None)
    with pytest.raises(ValueError, match="7 rows of logits, and draws of 6"):
        OWN.best(logits_of(7, 50, torch.float32), [draw], None)
