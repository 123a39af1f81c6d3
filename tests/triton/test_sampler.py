"""Triton's sampler matches the torch sampler."""

from dataclasses import replace

import pytest
import torch

from cluster.sampling import filters
from cluster.sampling.noise import at_least_float32, vocabulary_hashes
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.torch_sampler import TORCH
from cluster.sampling.triton_sampler import TritonSampler, row_thresholds
from cluster.spec.tree import FLOOR
from tests.unit.sampling.test_c_sampler import DTYPES, random_inputs, random_logits, unfiltered_sampling
from tests.unit.sampling.test_sampler import mixed_sampling

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}
TRITON = TritonSampler()


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.sampling.triton_sampler.COLUMNS_PER_PROGRAM", 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 129, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 64, 1000))])
@pytest.mark.parametrize("noisy", [False, True])
def test_triton_best_and_top_logprobs_match_reference(noisy: bool, vocab: int, dtype: torch.dtype) -> None:
    logits, draw = random_logits(6, vocab, dtype), random_inputs(unfiltered_sampling(2, dtype), 3, vocab, dtype)
    draws = [draw if noisy else replace(draw, noise=None)]
    tolerance, all_bests = TOLERANCE[dtype], TORCH.shard_best(SamplerInput(logits, draws), vocab)
    column, score = TRITON.best(SamplerInput(logits, draws))
    assert torch.allclose(score, all_bests[0][:, 0], rtol=tolerance, atol=tolerance)
    # Two columns may have equal scores, so scores are compared, not columns.
    by_column = torch.empty_like(all_bests[0]).scatter_(1, all_bests[1], all_bests[0])
    assert torch.allclose(by_column.gather(1, column[:, None])[:, 0], score, rtol=tolerance, atol=tolerance), (
        "not a best column"
    )
    for count in {min(count, vocab) for count in (1, 5)}:
        scores, columns, total = TRITON.shard_best(SamplerInput(logits, draws), count)
        assert torch.allclose(scores, all_bests[0][:, :count], rtol=tolerance, atol=tolerance)
        assert torch.allclose(by_column.gather(1, columns), scores, rtol=tolerance, atol=tolerance)
        assert all(len(set(row)) == count for row in columns.tolist())
        assert torch.allclose(total, all_bests[2], rtol=tolerance, atol=tolerance)
        logprobs, columns_again = TRITON.top_logprobs(SamplerInput(logits, draws), count)
        assert torch.equal(columns_again, columns) and torch.allclose(
            logprobs, scores - total, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32])
def test_triton_filtered_sampling_matches_reference(dtype: torch.dtype) -> None:
    sampling, vocab = mixed_sampling(dtype), 500
    logits, draw = random_logits(12, vocab, dtype), random_inputs(sampling, 2, vocab, dtype)
    for thresholds in (None, random_logits(12, vocab, dtype).topk(9).values[:, 8:]):
        columns, score = TRITON.best(SamplerInput(logits, [draw], thresholds))
        expected_columns, expected_score = TORCH.best(SamplerInput(logits, [draw], thresholds))
        assert torch.equal(columns, expected_columns)
        assert torch.allclose(score, expected_score, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        logprobs, columns = TRITON.top_logprobs(SamplerInput(logits, [draw], thresholds), 8)
        expected_logprobs, expected_columns = TORCH.top_logprobs(SamplerInput(logits, [draw], thresholds), 8)
        assert ((columns == expected_columns) | (expected_logprobs < FLOOR)).all()
        assert torch.allclose(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_sampler_handles_tree_and_prompt_rows_in_one_step(dtype: torch.dtype) -> None:
    """As in a step, the rows of trees come first and the last rows of prompts after them."""
    logits, vocab = random_logits(9, 200, dtype), 200
    draws = [
        random_inputs(unfiltered_sampling(2, dtype), 3, vocab, dtype),
        random_inputs(unfiltered_sampling(3, dtype), 1, vocab, dtype),
    ]
    assert torch.equal(TRITON.best(SamplerInput(logits, draws))[0], TORCH.best(SamplerInput(logits, draws))[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_sampler_handles_ties_and_non_finite_logits(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor(
        [[1, 3, 3, 2], [0, 0, 0, 0], [-inf, -inf, 2, -inf], [5, nan, 1, 5], [5, 1, inf, 5]], dtype=dtype
    )
    draws = [random_inputs(replace(unfiltered_sampling(5, dtype), any_random=False), 1, 4, dtype)]
    draws = [replace(draws[0], noise=None)]
    columns, score = TRITON.best(SamplerInput(rows, draws))
    assert columns.tolist() == [1, 0, 2, 1, 2]
    assert score.isfinite().tolist() == [True, True, True, False, False]
    logprobs, columns = TRITON.top_logprobs(SamplerInput(rows, draws), 3)
    assert logprobs[3:].isnan().all() and columns[3:].tolist() == [[0, 1, 2]] * 2
    assert columns[:3].tolist() == [[1, 2, 3], [0, 1, 2], [2, 0, 1]]


def test_noise_of_wrong_shape_is_refused() -> None:
    """A Triton program would read memory beyond the end of the noise."""
    draw = random_inputs(unfiltered_sampling(2, torch.float32), 3, 50, torch.float32)
    with pytest.raises(ValueError, match="noise of 50 tokens for 60 columns"):
        TRITON.best(SamplerInput(random_logits(6, 60, torch.float32), [draw]))
    with pytest.raises(ValueError, match="7 rows of logits, and draws of 6"):
        TRITON.best(SamplerInput(random_logits(7, 50, torch.float32), [draw]))


def reference_thresholds(logits: torch.Tensor, draw: SamplingInputs) -> torch.Tensor:
    """The filter threshold of each row, computed by the torch sampler's filters."""
    rows = logits.view(draw.requests, draw.rows_per_request, logits.shape[1])
    scaled = rows.to(draw.sampling.inverse_temperature.dtype) * draw.sampling.inverse_temperature[:, None, None]
    return filters.filter_thresholds(scaled, draw.sampling).view(-1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "each"), [(1, 1), (7, 2), (129, 1), pytest.param(700, 2, marks=pytest.mark.slow)])
def test_triton_filter_thresholds_match_reference(
    vocab: int, each: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows have every mix of filters. Rounded logits repeat, so that many of them equal a threshold."""
    monkeypatch.setattr("cluster.sampling.triton_sampler.COLUMNS_PER_ITERATION", 128)
    sampling = mixed_sampling(at_least_float32(dtype))
    count = sampling.seeds.shape[0]
    draw = random_inputs(sampling, each, vocab, dtype)
    logits = random_logits(count * each, vocab, dtype)
    for rows in (logits, (2 * logits).round() / 2):
        assert torch.equal(row_thresholds(rows, draw), reference_thresholds(rows, draw))


def test_top_p_uses_the_probability_mass_left_by_top_k() -> None:
    """In a flat row about five tokens have half of the mass of ten tokens. Half of the mass of all 60 tokens takes more
    than ten tokens.
    """
    sampling = replace(mixed_sampling(torch.float32).narrow(0, 3), any_filtered=True)
    sampling = replace(sampling, top_k=torch.full((3,), 10), top_p=torch.tensor([0.5, 0.9, 0.1]), min_p=torch.zeros(3))
    draw, logits = random_inputs(sampling, 1, 60, torch.float32), random_logits(3, 60, torch.float32, 0.1)
    thresholds = row_thresholds(logits, draw)
    assert torch.equal(thresholds, reference_thresholds(logits, draw))
    kept_tokens = (logits * sampling.inverse_temperature[:, None] >= thresholds).sum(1)
    assert kept_tokens[0] in (4, 5, 6) and kept_tokens[1] in (8, 9) and kept_tokens[2] == 1


def test_filter_thresholds_take_strided_rows_and_empty_batches() -> None:
    sampling = mixed_sampling(torch.float32)
    draw = random_inputs(sampling, 1, 40, torch.float32)
    logits = random_logits(sampling.seeds.shape[0], 100, torch.float32)[:, :40]
    assert torch.equal(row_thresholds(logits, draw), reference_thresholds(logits.contiguous(), draw))
    empty_draw = random_inputs(sampling.narrow(0, 0), 3, 40, torch.float32)
    assert row_thresholds(logits[:0], empty_draw).shape == (0, 1)


def test_non_finite_row_gets_nan_threshold_and_keeps_all_tokens() -> None:
    inf, nan = float("inf"), float("nan")
    sampling = mixed_sampling(torch.float32)
    rows = torch.tensor([[1, nan, 2, 3], [1, inf, 2, 3], [-inf] * 4, [1, -inf, 2, 3]])
    for first in range(0, sampling.seeds.shape[0] - 4, 4):
        draw = random_inputs(sampling.narrow(first, first + 4), 1, 4, torch.float32)
        actual, expected = row_thresholds(rows, draw), reference_thresholds(rows, draw)
        assert actual[:3].isnan().all()
        assert torch.equal(actual[3], expected[3])
        assert torch.equal(TRITON.best(SamplerInput(rows, [draw]))[0][:2], torch.tensor([1, 1]))


@pytest.mark.parametrize("count", [1, 5, 17])
def test_triton_noise_keys_match_reference_for_strided_and_extreme_seeds(count: int) -> None:
    """The seeds are a strided view; the largest seed and negative seeds are among them."""
    seeds = torch.tensor([[0, 9], [2**63 - 1, 9], [-(2**63), 9], [-1, 9], [123456789, 9]])[:, 0]
    first = torch.tensor([0, 1, 2**40, 7, 9])
    for requests in (0, 1, 5):
        arguments = seeds[:requests], first[:requests], count, vocabulary_hashes(3, torch.device("cpu")), torch.float32
        actual, expected = TRITON.noise(*arguments), TORCH.noise(*arguments)
        assert actual.cached_values is None and torch.equal(actual.keys, expected.keys)
