"""Blockwise sampling against a simple reference over complete tensors, and the memory that sampling needs."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.batch import SamplingBatch
from cluster.models.vocab import ShardedLogits
from cluster.request import RequestParams
from cluster.sampling import filters
from cluster.sampling.filters import LogitRows, float_of_ordered_bits, ordered_bits
from cluster.sampling.noise import Noise, gumbel, noise_keys, token_hashes, vocabulary_hashes
from cluster.sampling.radix_select import Digit, RadixSelect, SortedSelect, ThresholdSearch, radix_descend
from cluster.sampling.sampler import TOP_LOGPROBS, choose, logprobs, top_logprobs
from cluster.sampling.sampling_inputs import SamplingInputs
from cluster.spec.tree import FLOOR
from tests.unit.sampling.samplings import apply_filters, chosen, sampling_of, single_rank_logits, top_tokens

MIXED = [
    RequestParams(temperature=0.0),
    RequestParams(temperature=0.8),
    RequestParams(temperature=1.0, top_k=5),
    RequestParams(temperature=1.2, top_p=0.7),
    RequestParams(temperature=1.0, min_p=0.05),
    RequestParams(temperature=0.6, top_k=9, top_p=0.8, min_p=0.02),
]


def mixed_sampling(dtype: torch.dtype) -> SamplingBatch:
    """Return a batch with one request for each of `MIXED`.

    Its columns are views of rows, so they are not contiguous, like those of `SamplingTable.take`.
    """
    batches = [
        sampling_of(1, dtype=dtype, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
        for p in MIXED
    ]
    names = ("inverse_temperature", "noise_scale", "top_k", "top_p", "min_p")
    inverse, scale, top_k, top_p, min_p = (torch.cat([getattr(batch, name) for batch in batches]) for name in names)
    inverse, scale, top_p, min_p = torch.stack([inverse, scale, top_p, min_p], 1).unbind(1)
    top_k, seeds = torch.stack([top_k, torch.arange(len(batches)) * 77], 1).unbind(1)
    return SamplingBatch(inverse, scale, top_k, top_p, min_p, seeds, True, True)


def sorted_filter(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """Apply the filters to sorted rows: the slow reference of `apply_filters`."""
    vocab = tempered.shape[-1]
    ordered = tempered.sort(-1, descending=True).values
    keep = torch.where(sampling.top_k > 0, sampling.top_k, vocab).clamp_(max=vocab)[:, None, None]
    kth = ordered.gather(-1, (keep - 1).expand(*tempered.shape[:2], 1))
    mass = ordered.masked_fill(ordered < kth, float("-inf")).softmax(-1)
    mass_before = mass.cumsum(-1) - mass
    top_p = sampling.top_p[:, None, None]
    allowed = (mass_before < top_p) | (top_p >= 1)  # `mass_before` may be rounded to 1
    allowed &= (mass >= sampling.min_p[:, None, None] * mass[..., :1]) & (ordered >= kth)
    allowed[..., 0] = True
    last = allowed.sum(-1, keepdim=True) - 1
    return tempered.masked_fill(tempered < ordered.gather(-1, last), float("-inf"))


def reference_scores(logits: Tensor, sampling: SamplingBatch, keys: Tensor, noise_index: Tensor) -> Tensor:
    """Return the scores of all tokens, over complete tensors. The sampled token has the highest score."""
    noise = gumbel(keys, vocabulary_hashes(logits.shape[-1], logits.device), logits.dtype)
    noise = noise.gather(1, noise_index[..., None].expand(*noise_index.shape, noise.shape[-1]))
    tempered = sorted_filter(logits.to(noise.dtype) * sampling.inverse_temperature[:, None, None], sampling)
    return tempered + noise * sampling.noise_scale[:, None, None]


@pytest.mark.parametrize("max_cached_values", [0, 1 << 22])
@pytest.mark.parametrize("block", [1, 40, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blockwise_sampling_equals_sampling_over_complete_tensors(
    block: int, max_cached_values: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.sampling.row_blocks.MAX_BLOCK", block)
    monkeypatch.setattr("cluster.sampling.noise.MAX_CACHED_VALUES", max_cached_values)
    torch.manual_seed(3)
    sampling, r = mixed_sampling(dtype), len(MIXED)
    logits = torch.randn(r, 4, 37, dtype=torch.float64).mul(3).to(dtype)
    keys = noise_keys(sampling.seeds, torch.arange(5).expand(r, -1))
    noise_index = torch.randint(5, (r, 4))
    noise = Noise.of(keys, vocabulary_hashes(37, keys.device), dtype)
    assert (noise.cached_values is None) == (not max_cached_values)
    tokens, scores = chosen(logits, sampling, noise, noise_index)
    expected_scores = reference_scores(logits, sampling, keys, noise_index)
    assert torch.equal(tokens, expected_scores.argmax(-1))
    assert torch.equal(scores, expected_scores.amax(-1))
    consecutive, _ = chosen(logits, sampling, noise.at(0, 4))
    assert torch.equal(consecutive, reference_scores(logits, sampling, keys, torch.arange(4).expand(r, -1)).argmax(-1))
    greedy, _ = chosen(logits, sampling, None)
    assert torch.equal(greedy, logits.argmax(-1))


@pytest.mark.parametrize("block", [1, 1 << 22])
def test_blockwise_top_candidates_equal_the_complete_distribution(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.sampling.row_blocks.MAX_BLOCK", block)
    torch.manual_seed(5)
    sampling, r, ids = mixed_sampling(torch.float64), len(MIXED), torch.tensor([3, 5, 8, 13, 21, 34, 55])
    logits = torch.randn(r, 3, len(ids), dtype=torch.float64)
    keys = noise_keys(sampling.seeds, torch.full((r, 1), 9))
    log_probs, columns = top_tokens(logits, sampling, Noise.of(keys, token_hashes(ids), torch.float64), 2)
    noise = gumbel(keys, vocabulary_hashes(60, ids.device), torch.float64)[..., ids]
    tempered = sorted_filter(logits * sampling.inverse_temperature[:, None, None], sampling)
    expected = (tempered + noise * sampling.noise_scale[:, None, None]).log_softmax(-1).topk(2, -1)
    is_finite = expected.values.isfinite()
    assert torch.equal(columns[is_finite], expected.indices[is_finite])
    assert torch.allclose(log_probs[is_finite], expected.values[is_finite])
    assert bool((log_probs[~is_finite] < FLOOR).all()), "filtered tokens must be below the floor of a tree's candidates"
    log_probs, columns = top_tokens(logits, sampling, None, 2)
    assert torch.allclose(log_probs, logits.log_softmax(-1).topk(2, -1).values)


@pytest.mark.parametrize("block", [1, 1 << 22])
def test_logprobs_equal_log_softmax_of_the_logits(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.sampling.row_blocks.MAX_BLOCK", block)
    torch.manual_seed(6)
    logits, rows, tokens = torch.randn(9, 50), torch.tensor([7, 0, 0, 8]), torch.tensor([1, 2, 3, 49])
    actual, expected = logprobs(single_rank_logits(logits), rows, tokens), logits[rows].log_softmax(-1)
    assert torch.allclose(actual.chosen, expected.gather(1, tokens[:, None])[:, 0])
    assert torch.equal(actual.ids, expected.topk(TOP_LOGPROBS, -1).indices)
    assert torch.allclose(actual.values, expected.topk(TOP_LOGPROBS, -1).values)
    small_vocabulary = logprobs(single_rank_logits(logits[:, :7]), rows, tokens.clamp(max=6))
    assert small_vocabulary.ids.shape == (4, 7), "a vocabulary of 7 tokens has no twenty top log-probabilities"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ordered_bits_compare_like_their_floats(dtype: torch.dtype) -> None:
    tiny, infinity = torch.finfo(dtype).smallest_normal, float("inf")
    floats = torch.tensor([-infinity, -3e38, -2.5, -tiny, -0.0, 0.0, tiny / 4, 1e-3, 7.0, infinity], dtype=dtype)
    bits = ordered_bits(floats)
    assert bool((bits[1:] > bits[:-1]).all())
    assert torch.equal(ordered_bits(bits.view(dtype)).view(dtype), floats)


@pytest.mark.parametrize("select_class", [SortedSelect, RadixSelect])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_search_equals_a_scan_from_the_highest_value(
    select_class: Callable[[Tensor], ThresholdSearch], dtype: torch.dtype
) -> None:
    """The values include all sizes, ties and infinities; the weights include 0."""
    generator = torch.Generator().manual_seed(8)
    for trial in range(60):
        floats = torch.randn(3, 23, dtype=torch.float64, generator=generator) * 10.0 ** (trial % 9 - 4)
        floats = (floats.round() if trial % 2 else floats).to(dtype)
        floats[0, :3] = float("-inf")
        weights = torch.randint(0, 4, floats.shape, generator=generator)
        weights[:, 5] = 1
        needed = torch.stack([torch.randint(1, int(row.sum()) + 1, (1,), generator=generator) for row in weights])
        thresholds = float_of_ordered_bits(select_class(ordered_bits(floats)).threshold(needed, weights), dtype)
        for row, weight, needed_weight, threshold in zip(floats, weights, needed, thresholds, strict=True):
            expected = max(v for v in row.tolist() if int(weight[row >= v].sum()) >= int(needed_weight))
            assert float(threshold) == expected
        rank = needed.clamp(max=floats.shape[1])
        thresholds_by_rank = float_of_ordered_bits(select_class(ordered_bits(floats)).threshold(rank), dtype)
        assert torch.equal(thresholds_by_rank, floats.sort(1, descending=True).values.gather(1, rank - 1))


@pytest.mark.parametrize("sort_limit", [0, 1 << 30])
@pytest.mark.parametrize("vocab", [2, 7, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_filters_equal_filters_over_sorted_rows(
    vocab: int, dtype: torch.dtype, sort_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.sampling.radix_select.SORT_LIMIT", sort_limit)
    torch.manual_seed(vocab)
    sampling = mixed_sampling(dtype)
    for scale in (0.1, 2.0, 30.0):
        tempered = torch.randn(len(MIXED), 3, vocab, dtype=dtype) * scale
        assert torch.equal(apply_filters(tempered, sampling), sorted_filter(tempered, sampling))
        tied = tempered.round()
        assert torch.equal(apply_filters(tied, sampling), sorted_filter(tied, sampling))


@pytest.mark.parametrize("max_cached_values", [0, 1 << 22])
def test_noise_slices_equal_slices_of_the_complete_noise(
    max_cached_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of requests, positions and tokens, in any order, have the same bits, with cached values and without."""
    monkeypatch.setattr("cluster.sampling.noise.MAX_CACHED_VALUES", max_cached_values)
    monkeypatch.setattr("cluster.sampling.row_blocks.MAX_BLOCK", 100)
    generator = torch.Generator().manual_seed(4)
    keys = noise_keys(torch.arange(5), torch.arange(4).expand(5, -1))
    hashes = vocabulary_hashes(30, keys.device)
    noise, complete_noise = Noise.of(keys, hashes, torch.float32), gumbel(keys, hashes, torch.float32)
    assert torch.equal(noise.values(), complete_noise)
    assert torch.equal(noise.narrow(slice(1, 4)).at(1, 2).values(), complete_noise[1:4, 1:3])
    noise_index, ids = torch.randint(4, (5, 7), generator=generator), torch.randperm(30, generator=generator)[:11]
    assert torch.equal(noise.values(noise_index), complete_noise.gather(1, noise_index[..., None].expand(-1, -1, 30)))
    assert torch.equal(noise.over(ids, token_hashes(ids)).at(2).values(), complete_noise[:, 2:3, ids])
    picked = noise.pick(noise_index[:, 0]).over(ids, token_hashes(ids)).values()
    assert torch.equal(picked, complete_noise[torch.arange(5), noise_index[:, 0]][:, None, ids])
    assert noise.narrow(slice(5, None)).values().shape == (0, 4, 30)


def test_non_finite_row_gets_a_non_finite_score_and_changes_no_other_row() -> None:
    """The engine ends a request with a non-finite score. Other rows keep their bits."""
    torch.manual_seed(2)
    sampling, r = mixed_sampling(torch.float32), len(MIXED)
    logits = torch.randn(r, 2, 30)
    keys = noise_keys(sampling.seeds, torch.arange(2).expand(r, -1))
    noise = Noise.of(keys, vocabulary_hashes(30, keys.device), torch.float32)
    tokens, scores = chosen(logits, sampling, noise)
    for bad_value in (float("nan"), float("inf")):
        changed_logits = logits.clone()
        changed_logits[:, 1, 4] = bad_value
        new_tokens, new_scores = chosen(changed_logits, sampling, noise)
        assert torch.equal(new_tokens[:, 0], tokens[:, 0]) and torch.equal(new_scores[:, 0], scores[:, 0])
        assert not new_scores[:, 1].isfinite().any()


class PeakMemory(TorchDispatchMode):
    """Measures the peak bytes of tensor storages in its context, without the storage of `excluded`.

    A storage counts as long as a tensor on it exists.
    """

    def __init__(self, excluded: Tensor) -> None:
        super().__init__()
        self._excluded_storage = excluded.untyped_storage()._cdata
        self.current_bytes = self.peak_bytes = 0
        self._tensors: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and not any(tensor is arg for arg in args):
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address == self._excluded_storage:
            return
        if not self._tensors[address]:
            self.current_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self._tensors[address] += 1
        weakref.finalize(tensor, self._freed, address, size)

    def _freed(self, address: int, size: int) -> None:
        self._tensors[address] -= 1
        self.current_bytes -= size * (not self._tensors[address])


class IdenticalShards:
    """A fake exchange with `size` shards that all send what this shard sends. With `over_world`, the shards of the
    world score no rows of other groups here.
    """

    def __init__(self, size: int, wide: bool) -> None:
        self.size, self.over_world = size, wide

    def spread(self, numbers: Tensor) -> Tensor:
        return numbers

    def highest(self, numbers: Tensor) -> Tensor:
        return numbers

    def add(self, numbers: Tensor) -> Tensor:
        return numbers * self.size

    def compare(self, numbers: Tensor) -> Tensor:
        return numbers.expand(self.size, *numbers.shape)


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param(None, id="not sharded"),
        pytest.param(IdenticalShards(2, True), id="sharded over the world"),
        pytest.param(IdenticalShards(2, False), id="sharded over a group", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("filtering", [False, True])
def test_sampling_64_trees_uses_under_a_tenth_of_the_logits_memory(
    filtering: bool, shards: IdenticalShards | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R 64, N 64, V 128k on meta tensors, with log-probabilities. Of the filters' many blocks only the first runs, and
    of the rounds of a search over shards only the first two: the others take as much memory as the second. With two
    shards the limit is a tenth of the shard's own logits.
    """
    original_thresholds, computed = filters.thresholds, list[Tensor]()

    def first_block(rows: LogitRows, *arguments: Tensor) -> Tensor:
        computed[:] = computed or [original_thresholds(rows, *arguments)]
        return arguments[0]

    def two_rounds(histogram: Callable[[Digit], Tensor], weight: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
        def first_two(digit: Digit) -> Tensor:
            is_early = digit.high > digit.width - 2 * bits
            return histogram(digit) if is_early else weight.new_empty(weight.shape[0], digit.bins)

        return radix_descend(first_two, weight, bits, dtype)

    monkeypatch.setattr(filters, "thresholds", first_block)
    monkeypatch.setattr("cluster.sampling.sharded.radix_descend", two_rounds)
    r, n, steps, topk = 64, 64, 5, 8
    vocab = 128 * 1024
    width = vocab // (1 if shards is None else shards.size)
    meta = torch.device("meta")
    floats = [torch.empty(r, device=meta) for _ in range(4)]
    ids = torch.empty(r, dtype=torch.int64, device=meta)
    sampling = SamplingBatch(floats[0], floats[1], ids, floats[2], floats[3], ids, True, filtering)
    logits = torch.empty(r * n, width, device=meta)
    keys, depths = (torch.empty(r, m, dtype=torch.int64, device=meta) for m in (steps + 2, n))
    hashes = vocabulary_hashes(width, meta)
    with PeakMemory(logits) as choose_memory:
        noise = Noise.of(keys, hashes, torch.float32)
        columns = ShardedLogits(logits, vocab, shards=shards)
        tokens, _ = choose(columns, [SamplingInputs(n, sampling, noise.at(0, steps + 1), depths)])
        rows = torch.empty(r * (steps + 1), dtype=torch.int64, device=meta)
        logprobs(columns, rows, tokens[: r * (steps + 1)])
    assert 0 < choose_memory.peak_bytes < 0.1 * logits.nbytes, (
        f"{choose_memory.peak_bytes / logits.nbytes:.2f} of the logits"
    )
    drafted = torch.empty(r * topk, width, device=meta)
    with PeakMemory(drafted) as draft_memory:
        top_logprobs(ShardedLogits(drafted, vocab, shards=shards), SamplingInputs(topk, sampling, noise.at(0)), topk)
    assert 0 < draft_memory.peak_bytes < 0.1 * logits.nbytes, (
        f"{draft_memory.peak_bytes / logits.nbytes:.2f} of the target's logits"
    )
