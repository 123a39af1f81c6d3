"""The chooser by Triton equals its twin."""

from dataclasses import replace

import pytest
import torch

from cluster.sampling import filters
from cluster.sampling.noise import at_least_float32, vocabulary_hashes
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.torch_sampler import TORCH
from cluster.sampling.triton_sampler import TritonSampler, row_thresholds
from cluster.spec.tree import FLOOR
from tests.unit.sampling.test_c_sampler import DTYPES, draw_of, logits_of, unfiltered
from tests.unit.sampling.test_sampler import mixed

NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}
OWN = TritonSampler()


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.sampling.triton_sampler.COLUMNS_PER_PROGRAM", 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 64, 129, 1000])
@pytest.mark.parametrize("noisy", [False, True])
def test_triton_best_and_top_logprobs_match_reference(noisy: bool, vocab: int, dtype: torch.dtype) -> None:
    logits, draw = logits_of(6, vocab, dtype), draw_of(unfiltered(2, dtype), 3, vocab, dtype)
    draws = [draw if noisy else replace(draw, noise=None)]
    near, every = NEAR[dtype], TORCH.shard_best(SamplerInput(logits, draws), vocab)
    column, score = OWN.best(SamplerInput(logits, draws))
    assert torch.allclose(score, every[0][:, 0], rtol=near, atol=near)
    by_column = torch.empty_like(every[0]).scatter_(1, every[1], every[0])
    assert torch.allclose(by_column.gather(1, column[:, None])[:, 0], score, rtol=near, atol=near), "two may be as good"
    for count in {min(count, vocab) for count in (1, 5)}:
        scores, columns, total = OWN.shard_best(SamplerInput(logits, draws), count)
        assert torch.allclose(scores, every[0][:, :count], rtol=near, atol=near)
        assert torch.allclose(by_column.gather(1, columns), scores, rtol=near, atol=near)
        assert all(len(set(row)) == count for row in columns.tolist())
        assert torch.allclose(total, every[2], rtol=near, atol=near)
        likely, again = OWN.top_logprobs(SamplerInput(logits, draws), count)
        assert torch.equal(again, columns) and torch.allclose(likely, scores - total, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_triton_filtered_sampling_matches_reference(dtype: torch.dtype) -> None:
    sampling, vocab = mixed(dtype), 500
    logits, draw = logits_of(12, vocab, dtype), draw_of(sampling, 2, vocab, dtype)
    for least in (None, logits_of(12, vocab, dtype).topk(9).values[:, 8:]):
        columns, score = OWN.best(SamplerInput(logits, [draw], least))
        wanted, best = TORCH.best(SamplerInput(logits, [draw], least))
        assert torch.equal(columns, wanted)
        assert torch.allclose(score, best, rtol=NEAR[dtype], atol=NEAR[dtype])
        likely, columns = OWN.top_logprobs(SamplerInput(logits, [draw], least), 8)
        twin, wanted = TORCH.top_logprobs(SamplerInput(logits, [draw], least), 8)
        assert ((columns == wanted) | (twin < FLOOR)).all()
        assert torch.allclose(likely, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_sampler_handles_tree_and_prompt_rows_in_one_step(dtype: torch.dtype) -> None:
    """Trees, then the ends of prompts, as in a step."""
    logits, vocab = logits_of(9, 200, dtype), 200
    draws = [draw_of(unfiltered(2, dtype), 3, vocab, dtype), draw_of(unfiltered(3, dtype), 1, vocab, dtype)]
    assert torch.equal(OWN.best(SamplerInput(logits, draws))[0], TORCH.best(SamplerInput(logits, draws))[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_sampler_handles_ties_and_non_finite_logits(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor(
        [[1, 3, 3, 2], [0, 0, 0, 0], [-inf, -inf, 2, -inf], [5, nan, 1, 5], [5, 1, inf, 5]], dtype=dtype
    )
    draws = [draw_of(replace(unfiltered(5, dtype), any_random=False), 1, 4, dtype)]
    draws = [replace(draws[0], noise=None)]
    columns, score = OWN.best(SamplerInput(rows, draws))
    assert columns.tolist() == [1, 0, 2, 1, 2]
    assert score.isfinite().tolist() == [True, True, True, False, False]
    likely, columns = OWN.top_logprobs(SamplerInput(rows, draws), 3)
    assert likely[3:].isnan().all() and columns[3:].tolist() == [[0, 1, 2]] * 2
    assert columns[:3].tolist() == [[1, 2, 3], [0, 1, 2], [2, 0, 1]]


def test_noise_of_wrong_shape_is_refused() -> None:
    """A program would read whatever lies behind it."""
    draw = draw_of(unfiltered(2, torch.float32), 3, 50, torch.float32)
    with pytest.raises(ValueError, match="noise of 50 tokens for 60 columns"):
        OWN.best(SamplerInput(logits_of(6, 60, torch.float32), [draw]))
    with pytest.raises(ValueError, match="7 rows of logits, and draws of 6"):
        OWN.best(SamplerInput(logits_of(7, 50, torch.float32), [draw]))


def kept_by_the_twin(logits: torch.Tensor, draw: SamplingInputs) -> torch.Tensor:
    rows = logits.view(draw.requests, draw.rows_per_request, logits.shape[1])
    wide = rows.to(draw.sampling.inverse_temperature.dtype) * draw.sampling.inverse_temperature[:, None, None]
    return filters.filter_thresholds(wide, draw.sampling).view(-1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "each"), [(1, 1), (7, 2), (129, 1), pytest.param(700, 2, marks=pytest.mark.slow)])
def test_triton_filter_thresholds_match_reference(
    vocab: int, each: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mix of filters; logits that repeat, so that many lie on a threshold."""
    monkeypatch.setattr("cluster.sampling.triton_sampler.COLUMNS_PER_ITERATION", 128)
    sampling = mixed(at_least_float32(dtype))
    count = sampling.seeds.shape[0]
    draw = draw_of(sampling, each, vocab, dtype)
    logits = logits_of(count * each, vocab, dtype)
    for given in (logits, (2 * logits).round() / 2):
        assert torch.equal(row_thresholds(given, draw), kept_by_the_twin(given, draw))


def test_top_p_uses_the_probability_mass_left_by_top_k() -> None:
    """Of flat rows half of the mass of ten tokens is about five, half of that of all is more than ten."""
    sampling = replace(mixed(torch.float32).narrow(0, 3), any_filtered=True)
    sampling = replace(sampling, top_k=torch.full((3,), 10), top_p=torch.tensor([0.5, 0.9, 0.1]), min_p=torch.zeros(3))
    draw, logits = draw_of(sampling, 1, 60, torch.float32), logits_of(3, 60, torch.float32, 0.1)
    least = row_thresholds(logits, draw)
    assert torch.equal(least, kept_by_the_twin(logits, draw))
    kept = (logits * sampling.inverse_temperature[:, None] >= least).sum(1)
    assert kept[0] in (4, 5, 6) and kept[1] in (8, 9) and kept[2] == 1


def test_filter_thresholds_take_strided_rows_and_empty_batches() -> None:
    sampling = mixed(torch.float32)
    draw = draw_of(sampling, 1, 40, torch.float32)
    logits = logits_of(sampling.seeds.shape[0], 100, torch.float32)[:, :40]
    assert torch.equal(row_thresholds(logits, draw), kept_by_the_twin(logits.contiguous(), draw))
    none = draw_of(sampling.narrow(0, 0), 3, 40, torch.float32)
    assert row_thresholds(logits[:0], none).shape == (0, 1)


def test_non_finite_row_gets_nan_threshold_and_keeps_all_tokens() -> None:
    inf, nan = float("inf"), float("nan")
    sampling = mixed(torch.float32)
    rows = torch.tensor([[1, nan, 2, 3], [1, inf, 2, 3], [-inf] * 4, [1, -inf, 2, 3]])
    for first in range(0, sampling.seeds.shape[0] - 4, 4):
        draw = draw_of(sampling.narrow(first, first + 4), 1, 4, torch.float32)
        least, twin = row_thresholds(rows, draw), kept_by_the_twin(rows, draw)
        assert least[:3].isnan().all()
        assert torch.equal(least[3], twin[3])
        assert torch.equal(OWN.best(SamplerInput(rows, [draw]))[0][:2], torch.tensor([1, 1]))


@pytest.mark.parametrize("count", [1, 5, 17])
def test_triton_noise_keys_match_reference_for_strided_and_extreme_seeds(count: int) -> None:
    """For seeds that lie apart, the largest and negative ones too."""
    seeds = torch.tensor([[0, 9], [2**63 - 1, 9], [-(2**63), 9], [-1, 9], [123456789, 9]])[:, 0]
    first = torch.tensor([0, 1, 2**40, 7, 9])
    for requests in (0, 1, 5):
        given = seeds[:requests], first[:requests], count, vocabulary_hashes(3, torch.device("cpu")), torch.float32
        own, twin = OWN.noise(*given), TORCH.noise(*given)
        assert own.cached_values is None and torch.equal(own.keys, twin.keys)
