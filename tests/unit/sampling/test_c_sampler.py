"""The C sampler equals the torch reference, also for columns that it skips, and a row's bits do not depend on the other
rows of its batch.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.engine.backends import sampler_of
from cluster.kernels.torch_kernels import TorchKernels
from cluster.sampling.c_sampler import MAX_COUNT, CSampler
from cluster.sampling.noise import Noise, at_least_float32, gumbel_of, noise_bits, noise_keys, vocabulary_hashes
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.token_bitmask import apply_token_bitmask
from cluster.sampling.torch_sampler import TORCH, TorchSampler
from cluster.spec.tree import FLOOR
from tests.unit.kernels.library import c_kernels, c_library
from tests.unit.sampling.samplings import sampling_of
from tests.unit.sampling.test_sampler import mixed_sampling
from tests.unit.sampling.test_token_bitmask import equal_with_nan, random_logits_and_masks

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6}
"""The allowed difference between a score and the reference's score: a rounding error of numbers of about 32."""
NAN, INF = float("nan"), float("inf")


def c_sampler() -> CSampler:
    return CSampler(c_library())


def random_logits(rows: int, vocab: int, dtype: torch.dtype, spread: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, dtype=torch.float64, generator=generator) * spread).to(dtype)


def random_inputs(
    sampling: SamplingBatch, rows_per_request: int, vocab: int, dtype: torch.dtype, start: int = 0
) -> SamplingInputs:
    """Return sampling inputs with `rows_per_request` rows per request. The rows are at random positions."""
    keys = noise_keys(sampling.seeds, torch.arange(5).expand(sampling.seeds.shape[0], -1))
    noise_index = torch.randint(
        5, (keys.shape[0], rows_per_request), generator=torch.Generator().manual_seed(rows_per_request)
    )
    return SamplingInputs(
        rows_per_request, sampling, Noise(keys, vocabulary_hashes(vocab, CPU, start), dtype), noise_index
    )


def all_scores(logits: Tensor, draw: SamplingInputs | None) -> Tensor:
    """Return all scores of the C sampler, `[T, v]`. Each call has only a few columns, so that none are skipped."""
    vocab, score_blocks = logits.shape[1], []
    for start in range(0, vocab, MAX_COUNT):
        block = logits[:, start : start + MAX_COUNT]
        width = block.shape[1]
        block_inputs = [SamplingInputs(1, sampling_of(0), None)]
        if draw is not None and draw.noise is not None:
            noise = Noise(draw.noise.keys, draw.noise.hashes[start : start + width], draw.noise.dtype)
            block_inputs = [SamplingInputs(draw.rows_per_request, draw.sampling, noise, draw.noise_index)]
        values, columns, _ = c_sampler().shard_best(SamplerInput(block, block_inputs), width)
        score_blocks.append(torch.empty_like(values).scatter_(1, columns, values))
    return torch.cat(score_blocks, 1)


def unfiltered_sampling(requests: int, dtype: torch.dtype) -> SamplingBatch:
    """Return a batch without filters: all requests sample, except the last, which is greedy."""
    random_batch, greedy_batch = sampling_of(requests - 1, dtype=dtype, temperature=0.8), sampling_of(1, dtype=dtype)
    names = ("inverse_temperature", "noise_scale", "top_k", "top_p", "min_p")
    columns = (torch.cat([getattr(random_batch, name), getattr(greedy_batch, name)]) for name in names)
    return SamplingBatch(*columns, torch.arange(requests) * 77, True, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 64, 2049])
@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_c_sampler_scores_are_close_to_the_torch_reference(vocab: int, dtype: torch.dtype, spread: float) -> None:
    sampling, logits = unfiltered_sampling(4, dtype), random_logits(12, vocab, dtype, spread)
    draw = random_inputs(sampling, 3, vocab, dtype)
    reference = torch.cat(
        [
            TORCH.shard_best(SamplerInput(logits[:, i : i + 1], [inputs_of_column(draw, i)]), 1)[0]
            for i in range(min(vocab, 70))
        ],
        1,
    )
    scores = all_scores(logits, draw)[:, :70]
    assert scores.dtype == reference.dtype == at_least_float32(dtype)
    assert ((scores - reference).abs() <= TOLERANCE[scores.dtype] * reference.abs().clamp(min=1)).all()


def inputs_of_column(draw: SamplingInputs, column: int) -> SamplingInputs:
    """Return the sampling inputs of one column."""
    assert draw.noise is not None
    noise = Noise(draw.noise.keys, draw.noise.hashes[column : column + 1], draw.noise.dtype)
    return SamplingInputs(draw.rows_per_request, draw.sampling, noise, draw.noise_index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 31, 33, 64, 2049, 128256])
@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_c_sampler_best_tokens_equal_a_sort_of_all_scores(vocab: int, dtype: torch.dtype, spread: float) -> None:
    """The best tokens have the same bits as in a sort of all scores. In a tie the lowest column is first."""
    if vocab > 10_000 and (spread != 3.0 or dtype == torch.float64):
        pytest.skip("a large vocabulary is tested with one spread and two dtypes only")
    sampling, logits = unfiltered_sampling(2, dtype), random_logits(6, vocab, dtype, spread)
    for draw in (None, random_inputs(sampling, 3, vocab, dtype)):
        inputs = [SamplingInputs(6, sampling_of(1), None)] if draw is None else [draw]
        scores = all_scores(logits, draw)
        values, order = scores.sort(dim=1, descending=True, stable=True)
        columns, score = c_sampler().best(SamplerInput(logits, inputs))
        assert torch.equal(columns, order[:, 0]) and torch.equal(score, values[:, 0])
        for count in {min(count, vocab) for count in ((1, 2, 5, 32, 64) if vocab < 10_000 else (4,))}:
            top_scores, top_columns, total = c_sampler().shard_best(SamplerInput(logits, inputs), count)
            assert torch.equal(top_scores, values[:, :count]) and torch.equal(top_columns, order[:, :count])
            tolerance = TOLERANCE[total.dtype]
            assert torch.allclose(total[:, 0].double(), scores.double().logsumexp(1), rtol=tolerance, atol=tolerance)
            log_probs, top_columns = c_sampler().top_logprobs(SamplerInput(logits, inputs), count)
            assert torch.equal(log_probs, top_scores - total) and torch.equal(top_columns, order[:, :count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500, 2049])
def test_sampling_with_a_bitmask_equals_sampling_from_masked_logits(vocab: int, dtype: torch.dtype) -> None:
    """One row's mask is empty, and one row's mask allows all tokens."""
    logits, masks = random_logits_and_masks(6, vocab, dtype)
    masked_logits = apply_token_bitmask(logits, masks, None)
    for inputs in (
        [SamplingInputs(6, sampling_of(1), None)],
        [random_inputs(unfiltered_sampling(2, dtype), 3, vocab, dtype)],
    ):
        for sampler in (c_sampler(), TORCH):
            with_bitmask, expected = (
                [sampler.best(SamplerInput(logits, inputs, None, masks))],
                [sampler.best(SamplerInput(masked_logits, inputs))],
            )
            for count in {1, min(5, vocab), min(MAX_COUNT, vocab)}:
                with_bitmask.append(sampler.top_logprobs(SamplerInput(logits, inputs, None, masks), count))
                expected.append(sampler.top_logprobs(SamplerInput(masked_logits, inputs), count))
            for actual, reference in zip(with_bitmask, expected, strict=True):
                assert equal_with_nan(actual[0], reference[0]) and equal_with_nan(actual[1], reference[1])


def test_c_sampler_refuses_masks_of_wrong_shape_or_with_filters() -> None:
    logits, masks = random_logits_and_masks(24, 500, torch.float32)
    plain, filtered = (
        SamplingInputs(24, sampling_of(1), None),
        random_inputs(mixed_sampling(torch.float32), 4, 500, torch.float32),
    )
    for wrong in (masks[:3], masks[:, :3]):
        with pytest.raises(ValueError, match="do not fit"):
            c_sampler().best(SamplerInput(logits, [plain], None, wrong))
    with pytest.raises(ValueError, match="must be applied to the logits beforehand"):
        c_sampler().best(SamplerInput(logits, [filtered], None, masks))


@pytest.mark.parametrize("dtype", DTYPES)
def test_c_sampler_with_filters_equals_the_torch_reference(dtype: torch.dtype) -> None:
    sampling, vocab = mixed_sampling(dtype), 500
    logits, draw = random_logits(24, vocab, dtype), random_inputs(sampling, 4, vocab, dtype)
    for thresholds in (None, random_logits(24, vocab, dtype).to(at_least_float32(dtype)).topk(9).values[:, 8:]):
        columns, score = c_sampler().best(SamplerInput(logits, [draw], thresholds))
        expected_columns, reference_score = TORCH.best(SamplerInput(logits, [draw], thresholds))
        assert torch.equal(columns, expected_columns)
        assert torch.allclose(
            score, reference_score, rtol=TOLERANCE[reference_score.dtype], atol=TOLERANCE[reference_score.dtype]
        )
        log_probs, columns = c_sampler().top_logprobs(SamplerInput(logits, [draw], thresholds), 8)
        reference_log_probs, expected_columns = TORCH.top_logprobs(SamplerInput(logits, [draw], thresholds), 8)
        if dtype != torch.bfloat16:  # bfloat16 logits have ties
            assert ((columns == expected_columns) | (reference_log_probs < FLOOR)).all(), (
                "only tokens below FLOOR, whose scores have few digits left, may be in another order"
            )
        assert torch.allclose(log_probs, reference_log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_c_sampler_row_is_independent_of_batch_size_and_thread_count(dtype: torch.dtype) -> None:
    sampling, vocab, previous_threads = unfiltered_sampling(40, dtype), 1500, torch.get_num_threads()
    logits, draw = random_logits(120, vocab, dtype), random_inputs(sampling, 3, vocab, dtype)
    try:
        torch.set_num_threads(1)
        single_thread = [
            *c_sampler().shard_best(SamplerInput(logits, [draw]), 4),
            *c_sampler().top_logprobs(SamplerInput(logits, [draw]), 4),
        ]
        torch.set_num_threads(4)
        four_threads = [
            *c_sampler().shard_best(SamplerInput(logits, [draw]), 4),
            *c_sampler().top_logprobs(SamplerInput(logits, [draw]), 4),
        ]
    finally:
        torch.set_num_threads(previous_threads)
    assert all(torch.equal(a, b) for a, b in zip(single_thread, four_threads, strict=True))
    assert draw.noise is not None and draw.noise_index is not None
    for request in (0, 17, 39):
        request_rows = slice(request, request + 1)
        for row in range(3):
            noise = draw.noise.narrow(request_rows)
            single_row_inputs = [
                SamplingInputs(
                    1, sampling.narrow(request, request + 1), noise, draw.noise_index[request_rows, row : row + 1]
                )
            ]
            row_index = 3 * request + row
            row_logits = logits[row_index : row_index + 1]
            actual = [
                *c_sampler().shard_best(SamplerInput(row_logits, single_row_inputs), 4),
                *c_sampler().top_logprobs(SamplerInput(row_logits, single_row_inputs), 4),
            ]
            assert all(torch.equal(a[0], b[row_index]) for a, b in zip(actual, single_thread, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noisy", [False, True])
def test_c_sampler_handles_nan_and_infinite_logits(noisy: bool, dtype: torch.dtype) -> None:
    """NaN wins over +inf, and +inf over finite logits. In a tie the lowest column wins. Other rows keep their bits."""
    vocab, sampling = 203, unfiltered_sampling(7, dtype)
    logits = random_logits(7, vocab, dtype)
    draw = random_inputs(sampling, 1, vocab, dtype) if noisy else SamplingInputs(7, sampling_of(1), None)
    before_change = c_sampler().shard_best(SamplerInput(logits, [draw]), 3)
    logits[0, [9, 150]] = NAN
    logits[1, [40, 41]] = INF
    logits[2, 7], logits[2, 190] = INF, NAN
    logits[3] = -INF
    logits[4, 1:] = -INF
    columns, score = c_sampler().best(SamplerInput(logits, [draw]))
    assert columns[:5].tolist() == [9, 40, 190, 0, 0]
    assert score[[0, 2]].isnan().all() and score[1] == INF and score[3] == -INF and score[4].isfinite()
    expected_columns, reference_score = TORCH.best(SamplerInput(logits, [draw]))
    assert torch.equal(columns, expected_columns) and torch.equal(score.isfinite(), reference_score.isfinite())
    log_probs, columns = c_sampler().top_logprobs(SamplerInput(logits, [draw]), 3)
    assert log_probs[:4].isnan().all() and columns[:4].tolist() == [[0, 1, 2]] * 4
    assert log_probs[4].tolist() == [0.0, -INF, -INF] and columns[4].tolist() == [0, 1, 2]
    top_scores, columns, total = c_sampler().shard_best(SamplerInput(logits, [draw]), 3)
    assert total[[0, 2]].isnan().all() and total[[1, 3]].view(-1).tolist() == [INF, -INF]
    assert columns[1].tolist()[:2] == [40, 41] and top_scores[1, :2].isinf().all()
    assert all(torch.equal(a[5:], b[5:]) for a, b in zip((top_scores, columns, total), before_change, strict=True))


def hashes_with_noise_bits(low: int, bits: np.ndarray) -> Tensor:
    """Return the token hashes whose noise bits under the key `low` are `bits`: the inverse of the noise hash."""
    x = bits.astype(np.uint32)
    for shift, factor in ((16, 0xC2B2AE35), (13, 0x85EBCA6B)):
        y = x
        for _ in range(32 // shift):
            y = x ^ (y >> np.uint32(shift))
        x = y * np.uint32(pow(factor, -1, 1 << 32))
    y = x ^ (x >> np.uint32(16))
    return torch.from_numpy((y ^ np.uint32(low)).view(np.int32).copy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_c_sampler_noise_is_accurate_to_the_last_digits(dtype: torch.dtype) -> None:
    """The expected noise has more digits than float64, as the float32 reference has a small error of its own. The bits
    include both ends of the range and the neighbours of every power of two.
    """
    edge_bits = [0, 1, 2, 3, 0x7FFFFFFF, 0x7FFFFFFE]
    powers = [(1 << p) + d for p in range(2, 31) for d in (-1, 0, 1)]
    below = [0x80000000 - number for number in powers]
    roots = [int((1 - 2.0**-k * 0.5**0.5) * 2**31) + d for k in range(8) for d in range(-3, 4)]
    random_bits = np.random.default_rng(3).integers(0, 1 << 31, 20_000)
    bits = np.concatenate([np.array(edge_bits + powers + below + roots), random_bits])
    hashes, keys = hashes_with_noise_bits(12345, bits), torch.tensor([[12345]])
    assert torch.equal(noise_bits(keys, hashes)[0, 0], torch.from_numpy(bits).to(torch.int32))
    draw = SamplingInputs(1, sampling_of(1, dtype=dtype, temperature=1.0), Noise(keys, hashes, dtype))
    actual = all_scores(torch.zeros(1, len(bits), dtype=dtype), draw)[0].double().numpy()
    uniform = torch.from_numpy(bits).to(dtype).add(0.5).mul(2.0**-31).clamp(max=1 - torch.finfo(dtype).eps / 2)
    exact_uniform = np.longdouble(uniform.numpy())
    expected = -np.log(-np.log1p(-exact_uniform))
    error = np.abs(actual - expected) / torch.finfo(dtype).eps
    assert (error <= 1.5 * np.maximum(np.abs(expected), 1)).all()
    reference = gumbel_of(torch.from_numpy(bits).to(torch.int32), dtype).double().numpy()
    assert np.abs(actual - reference).max() <= 40 * torch.finfo(dtype).eps


def test_c_sampler_noise_keys_equal_the_torch_reference() -> None:
    generator = torch.Generator().manual_seed(6)
    seed_pairs = torch.randint(-(1 << 63), (1 << 63) - 1, (9, 3), generator=generator)
    for seeds, first in (
        (seed_pairs[:, 1], seed_pairs[:, 0]),
        (torch.tensor([0]), torch.tensor([0])),
        (seed_pairs[:0, 1], seed_pairs[:0, 0]),
    ):
        hashes = vocabulary_hashes(4, CPU)
        actual, reference = (sampler.noise(seeds, first, 5, hashes, torch.float32) for sampler in (c_sampler(), TORCH))
        assert torch.equal(actual.keys, reference.keys) and torch.equal(actual.values(), reference.values())
        assert actual.cached_values is None


def test_c_sampler_refuses_inputs_of_mismatched_shapes() -> None:
    """Without these checks, the C code would read memory beyond the inputs."""
    logits, draw = torch.zeros(2, 8), random_inputs(unfiltered_sampling(2, torch.float32), 1, 8, torch.float32)
    with pytest.raises(ValueError, match="noise of 8 tokens for 9 columns"):
        c_sampler().best(SamplerInput(torch.zeros(2, 9), [draw]))
    with pytest.raises(ValueError, match="3 rows of logits, and draws of 2"):
        c_sampler().best(SamplerInput(torch.zeros(3, 8), [draw]))
    with pytest.raises(ValueError, match="9 of 8 columns"):
        c_sampler().top_logprobs(SamplerInput(logits, [draw]), 9)
    assert c_sampler().best(SamplerInput(logits[:0], [SamplingInputs(0, sampling_of(0), None)]))[0].shape == (0,)


def test_c_sampler_takes_non_contiguous_rows() -> None:
    logits, draw = (
        random_logits(6, 300, torch.float32),
        random_inputs(unfiltered_sampling(6, torch.float32), 1, 100, torch.float32),
    )
    actual = c_sampler().shard_best(SamplerInput(logits[:, 100:200], [draw]), 3)
    expected = c_sampler().shard_best(SamplerInput(logits[:, 100:200].contiguous(), [draw]), 3)
    transposed = c_sampler().shard_best(SamplerInput(logits[:, 100:200].t().contiguous().t(), [draw]), 3)
    for actual_part, expected_part, transposed_part in zip(actual, expected, transposed, strict=True):
        assert torch.equal(actual_part, expected_part) and torch.equal(transposed_part, expected_part)


def test_sampler_implementation_matches_the_kernels() -> None:
    assert isinstance(sampler_of(TorchKernels()), TorchSampler)
    assert isinstance(sampler_of(c_kernels()), CSampler)
