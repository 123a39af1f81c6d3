"""The chooser in C equals its twin, whatever is passed over; a row's bits do not depend on the rows beside it."""

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
from tests.unit.sampling.test_sampler import mixed
from tests.unit.sampling.test_token_bitmask import made, same

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
NEAR = {torch.float64: 1e-13, torch.float32: 4e-6}
"""How far the same score may be from its twin: numbers of size 32 have this many last digits."""
NAN, INF = float("nan"), float("inf")


def c_chooser() -> CSampler:
    return CSampler(c_library())


def logits_of(rows: int, vocab: int, dtype: torch.dtype, spread: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, dtype=torch.float64, generator=generator) * spread).to(dtype)


def draw_of(sampling: SamplingBatch, each: int, vocab: int, dtype: torch.dtype, start: int = 0) -> SamplingInputs:
    """Rows of each request at positions of its own, in no order."""
    keys = noise_keys(sampling.seeds, torch.arange(5).expand(sampling.seeds.shape[0], -1))
    which = torch.randint(5, (keys.shape[0], each), generator=torch.Generator().manual_seed(each))
    return SamplingInputs(each, sampling, Noise(keys, vocabulary_hashes(vocab, CPU, start), dtype), which)


def all_scores(logits: Tensor, draw: SamplingInputs | None) -> Tensor:
    """Every score as C makes it, `[T, v]`: a few columns at a time, so that none is passed over."""
    vocab, parts = logits.shape[1], []
    for start in range(0, vocab, MAX_COUNT):
        some = logits[:, start : start + MAX_COUNT]
        width = some.shape[1]
        here = [SamplingInputs(1, sampling_of(0), None)]
        if draw is not None and draw.noise is not None:
            noise = Noise(draw.noise.keys, draw.noise.hashes[start : start + width], draw.noise.dtype)
            here = [SamplingInputs(draw.rows_per_request, draw.sampling, noise, draw.noise_index)]
        values, columns, _ = c_chooser().shard_best(SamplerInput(some, here), width)
        parts.append(torch.empty_like(values).scatter_(1, columns, values))
    return torch.cat(parts, 1)


def unfiltered(requests: int, dtype: torch.dtype) -> SamplingBatch:
    """Requests that sample, and at the end one that does not."""
    one, other = sampling_of(requests - 1, dtype=dtype, temperature=0.8), sampling_of(1, dtype=dtype)
    names = ("inverse_temperature", "noise_scale", "top_k", "top_p", "min_p")
    both = (torch.cat([getattr(one, name), getattr(other, name)]) for name in names)
    return SamplingBatch(*both, torch.arange(requests) * 77, True, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 64, 2049])
@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_c_sampler_scores_are_close_to_the_torch_reference(vocab: int, dtype: torch.dtype, spread: float) -> None:
    sampling, logits = unfiltered(4, dtype), logits_of(12, vocab, dtype, spread)
    draw = draw_of(sampling, 3, vocab, dtype)
    found = torch.cat(
        [TORCH.shard_best(SamplerInput(logits[:, i : i + 1], [cut(draw, i)]), 1)[0] for i in range(min(vocab, 70))], 1
    )
    ours = all_scores(logits, draw)[:, :70]
    assert ours.dtype == found.dtype == at_least_float32(dtype)
    assert ((ours - found).abs() <= NEAR[ours.dtype] * found.abs().clamp(min=1)).all()


def cut(draw: SamplingInputs, column: int) -> SamplingInputs:
    """The draw of one column."""
    assert draw.noise is not None
    noise = Noise(draw.noise.keys, draw.noise.hashes[column : column + 1], draw.noise.dtype)
    return SamplingInputs(draw.rows_per_request, draw.sampling, noise, draw.noise_index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 31, 33, 64, 2049, 128256])
@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_c_sampler_best_tokens_equal_a_sort_of_all_scores(vocab: int, dtype: torch.dtype, spread: float) -> None:
    """Bit by bit what follows from all scores, ties included: the lowest column first."""
    if vocab > 10_000 and (spread != 3.0 or dtype == torch.float64):
        pytest.skip("once is enough")
    sampling, logits = unfiltered(2, dtype), logits_of(6, vocab, dtype, spread)
    for draw in (None, draw_of(sampling, 3, vocab, dtype)):
        given = [SamplingInputs(6, sampling_of(1), None)] if draw is None else [draw]
        every = all_scores(logits, draw)
        values, order = every.sort(dim=1, descending=True, stable=True)
        columns, score = c_chooser().best(SamplerInput(logits, given))
        assert torch.equal(columns, order[:, 0]) and torch.equal(score, values[:, 0])
        for count in {min(count, vocab) for count in ((1, 2, 5, 32, 64) if vocab < 10_000 else (4,))}:
            got, at, total = c_chooser().shard_best(SamplerInput(logits, given), count)
            assert torch.equal(got, values[:, :count]) and torch.equal(at, order[:, :count])
            near = NEAR[total.dtype]
            assert torch.allclose(total[:, 0].double(), every.double().logsumexp(1), rtol=near, atol=near)
            likely, at = c_chooser().top_logprobs(SamplerInput(logits, given), count)
            assert torch.equal(likely, got - total) and torch.equal(at, order[:, :count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500, 2049])
def test_sampling_with_a_bitmask_equals_sampling_from_masked_logits(vocab: int, dtype: torch.dtype) -> None:
    """Also in a row whose mask is empty, and in one whose mask allows all."""
    logits, masks = made(6, vocab, dtype)
    bars = apply_token_bitmask(logits, masks, None)
    for each in ([SamplingInputs(6, sampling_of(1), None)], [draw_of(unfiltered(2, dtype), 3, vocab, dtype)]):
        for sampler in (c_chooser(), TORCH):
            found, wanted = (
                [sampler.best(SamplerInput(logits, each, None, masks))],
                [sampler.best(SamplerInput(bars, each))],
            )
            for count in {1, min(5, vocab), min(MAX_COUNT, vocab)}:
                found.append(sampler.top_logprobs(SamplerInput(logits, each, None, masks), count))
                wanted.append(sampler.top_logprobs(SamplerInput(bars, each), count))
            for one, two in zip(found, wanted, strict=True):
                assert same(one[0], two[0]) and same(one[1], two[1])


def test_c_sampler_refuses_masks_of_wrong_shape_or_with_filters() -> None:
    logits, masks = made(24, 500, torch.float32)
    plain, filtered = SamplingInputs(24, sampling_of(1), None), draw_of(mixed(torch.float32), 4, 500, torch.float32)
    for wrong in (masks[:3], masks[:, :3]):
        with pytest.raises(ValueError, match="do not fit"):
            c_chooser().best(SamplerInput(logits, [plain], None, wrong))
    with pytest.raises(ValueError, match="must be applied to the logits beforehand"):
        c_chooser().best(SamplerInput(logits, [filtered], None, masks))


@pytest.mark.parametrize("dtype", DTYPES)
def test_c_sampler_with_filters_equals_the_torch_reference(dtype: torch.dtype) -> None:
    sampling, vocab = mixed(dtype), 500
    logits, draw = logits_of(24, vocab, dtype), draw_of(sampling, 4, vocab, dtype)
    for least in (None, logits_of(24, vocab, dtype).to(at_least_float32(dtype)).topk(9).values[:, 8:]):
        columns, score = c_chooser().best(SamplerInput(logits, [draw], least))
        wanted, best = TORCH.best(SamplerInput(logits, [draw], least))
        assert torch.equal(columns, wanted)
        assert torch.allclose(score, best, rtol=NEAR[best.dtype], atol=NEAR[best.dtype])
        likely, columns = c_chooser().top_logprobs(SamplerInput(logits, [draw], least), 8)
        twin, wanted = TORCH.top_logprobs(SamplerInput(logits, [draw], least), 8)
        if dtype != torch.bfloat16:  # it has ties
            assert ((columns == wanted) | (twin < FLOOR)).all(), (
                "what is ruled out has few digits left to be ordered by"
            )
        assert torch.allclose(likely, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_c_sampler_row_is_independent_of_batch_size_and_thread_count(dtype: torch.dtype) -> None:
    sampling, vocab, before = unfiltered(40, dtype), 1500, torch.get_num_threads()
    logits, draw = logits_of(120, vocab, dtype), draw_of(sampling, 3, vocab, dtype)
    try:
        torch.set_num_threads(1)
        one = [
            *c_chooser().shard_best(SamplerInput(logits, [draw]), 4),
            *c_chooser().top_logprobs(SamplerInput(logits, [draw]), 4),
        ]
        torch.set_num_threads(4)
        many = [
            *c_chooser().shard_best(SamplerInput(logits, [draw]), 4),
            *c_chooser().top_logprobs(SamplerInput(logits, [draw]), 4),
        ]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
    assert draw.noise is not None and draw.noise_index is not None
    for request in (0, 17, 39):
        here = slice(request, request + 1)
        for row in range(3):
            noise = draw.noise.narrow(here)
            alone = [
                SamplingInputs(1, sampling.narrow(request, request + 1), noise, draw.noise_index[here, row : row + 1])
            ]
            number = 3 * request + row
            some = logits[number : number + 1]
            got = [
                *c_chooser().shard_best(SamplerInput(some, alone), 4),
                *c_chooser().top_logprobs(SamplerInput(some, alone), 4),
            ]
            assert all(torch.equal(a[0], b[number]) for a, b in zip(got, one, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noisy", [False, True])
def test_c_sampler_handles_nan_and_infinite_logits(noisy: bool, dtype: torch.dtype) -> None:
    """NaN and then +inf win, the lowest column first; rows beside them keep their bits."""
    vocab, sampling = 203, unfiltered(7, dtype)
    logits = logits_of(7, vocab, dtype)
    draw = draw_of(sampling, 1, vocab, dtype) if noisy else SamplingInputs(7, sampling_of(1), None)
    sound = c_chooser().shard_best(SamplerInput(logits, [draw]), 3)
    logits[0, [9, 150]] = NAN
    logits[1, [40, 41]] = INF
    logits[2, 7], logits[2, 190] = INF, NAN
    logits[3] = -INF
    logits[4, 1:] = -INF
    columns, score = c_chooser().best(SamplerInput(logits, [draw]))
    assert columns[:5].tolist() == [9, 40, 190, 0, 0]
    assert score[[0, 2]].isnan().all() and score[1] == INF and score[3] == -INF and score[4].isfinite()
    wanted, twin = TORCH.best(SamplerInput(logits, [draw]))
    assert torch.equal(columns, wanted) and torch.equal(score.isfinite(), twin.isfinite())
    likely, columns = c_chooser().top_logprobs(SamplerInput(logits, [draw]), 3)
    assert likely[:4].isnan().all() and columns[:4].tolist() == [[0, 1, 2]] * 4
    assert likely[4].tolist() == [0.0, -INF, -INF] and columns[4].tolist() == [0, 1, 2]
    found, columns, total = c_chooser().shard_best(SamplerInput(logits, [draw]), 3)
    assert total[[0, 2]].isnan().all() and total[[1, 3]].view(-1).tolist() == [INF, -INF]
    assert columns[1].tolist()[:2] == [40, 41] and found[1, :2].isinf().all()
    assert all(torch.equal(a[5:], b[5:]) for a, b in zip((found, columns, total), sound, strict=True))


def bits_under(low: int, bits: np.ndarray) -> Tensor:
    """The token hashes that have these `bits` of noise under the key `low`: the hash backwards."""
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
    """Against more digits, where the twin in float32 is a little off; at the ends and around every power of two."""
    ends = [0, 1, 2, 3, 0x7FFFFFFF, 0x7FFFFFFE]
    powers = [(1 << p) + d for p in range(2, 31) for d in (-1, 0, 1)]
    below = [0x80000000 - number for number in powers]
    roots = [int((1 - 2.0**-k * 0.5**0.5) * 2**31) + d for k in range(8) for d in range(-3, 4)]
    dice = np.random.default_rng(3).integers(0, 1 << 31, 20_000)
    bits = np.concatenate([np.array(ends + powers + below + roots), dice])
    hashes, keys = bits_under(12345, bits), torch.tensor([[12345]])
    assert torch.equal(noise_bits(keys, hashes)[0, 0], torch.from_numpy(bits).to(torch.int32))
    draw = SamplingInputs(1, sampling_of(1, dtype=dtype, temperature=1.0), Noise(keys, hashes, dtype))
    ours = all_scores(torch.zeros(1, len(bits), dtype=dtype), draw)[0].double().numpy()
    uniform = torch.from_numpy(bits).to(dtype).add(0.5).mul(2.0**-31).clamp(max=1 - torch.finfo(dtype).eps / 2)
    exact = np.longdouble(uniform.numpy())
    wanted = -np.log(-np.log1p(-exact))
    error = np.abs(ours - wanted) / torch.finfo(dtype).eps
    assert (error <= 1.5 * np.maximum(np.abs(wanted), 1)).all()
    twin = gumbel_of(torch.from_numpy(bits).to(torch.int32), dtype).double().numpy()
    assert np.abs(ours - twin).max() <= 40 * torch.finfo(dtype).eps


def test_c_sampler_noise_keys_equal_the_torch_reference() -> None:
    generator = torch.Generator().manual_seed(6)
    both = torch.randint(-(1 << 63), (1 << 63) - 1, (9, 3), generator=generator)
    for seeds, first in ((both[:, 1], both[:, 0]), (torch.tensor([0]), torch.tensor([0])), (both[:0, 1], both[:0, 0])):
        hashes = vocabulary_hashes(4, CPU)
        ours, twin = (each.noise(seeds, first, 5, hashes, torch.float32) for each in (c_chooser(), TORCH))
        assert torch.equal(ours.keys, twin.keys) and torch.equal(ours.values(), twin.values())
        assert ours.cached_values is None


def test_c_sampler_refuses_inputs_of_mismatched_shapes() -> None:
    """C would read whatever lies behind it."""
    logits, draw = torch.zeros(2, 8), draw_of(unfiltered(2, torch.float32), 1, 8, torch.float32)
    with pytest.raises(ValueError, match="noise of 8 tokens for 9 columns"):
        c_chooser().best(SamplerInput(torch.zeros(2, 9), [draw]))
    with pytest.raises(ValueError, match="3 rows of logits, and draws of 2"):
        c_chooser().best(SamplerInput(torch.zeros(3, 8), [draw]))
    with pytest.raises(ValueError, match="9 of 8 columns"):
        c_chooser().top_logprobs(SamplerInput(logits, [draw]), 9)
    assert c_chooser().best(SamplerInput(logits[:0], [SamplingInputs(0, sampling_of(0), None)]))[0].shape == (0,)


def test_c_sampler_takes_non_contiguous_rows() -> None:
    logits, draw = logits_of(6, 300, torch.float32), draw_of(unfiltered(6, torch.float32), 1, 100, torch.float32)
    got = c_chooser().shard_best(SamplerInput(logits[:, 100:200], [draw]), 3)
    wanted = c_chooser().shard_best(SamplerInput(logits[:, 100:200].contiguous(), [draw]), 3)
    turned = c_chooser().shard_best(SamplerInput(logits[:, 100:200].t().contiguous().t(), [draw]), 3)
    for one, other, third in zip(got, wanted, turned, strict=True):
        assert torch.equal(one, other) and torch.equal(third, other)


def test_sampler_implementation_matches_the_kernels() -> None:
    assert isinstance(sampler_of(TorchKernels()), TorchSampler)
    assert isinstance(sampler_of(c_kernels()), CSampler)
