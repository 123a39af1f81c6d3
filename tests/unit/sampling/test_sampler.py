"""Choosing block by block against the plain way over whole tensors, and how much memory it takes."""

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
from cluster.sampling.radix_select import RadixSelect, SortedSelect, ThresholdSearch
from cluster.sampling.sampler import TOP_LOGPROBS, choose, logprobs, top_logprobs
from cluster.sampling.sampling_inputs import SamplingInputs
from cluster.spec.tree import FLOOR
from tests.unit.sampling.samplings import best_of, chosen, filtered, sampling_of, whole

MIXED = [
    RequestParams(temperature=0.0),
    RequestParams(temperature=0.8),
    RequestParams(temperature=1.0, top_k=5),
    RequestParams(temperature=1.2, top_p=0.7),
    RequestParams(temperature=1.0, min_p=0.05),
    RequestParams(temperature=0.6, top_k=9, top_p=0.8, min_p=0.02),
]


def mixed(dtype: torch.dtype) -> SamplingBatch:
    """One request of each kind. As from `SamplingTable.take`, columns are views of rows, so they are not contiguous."""
    each = [
        sampling_of(1, dtype=dtype, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
        for p in MIXED
    ]
    names = ("inverse_temperature", "noise_scale", "top_k", "top_p", "min_p")
    inverse, scale, top_k, top_p, min_p = (torch.cat([getattr(one, name) for one in each]) for name in names)
    inverse, scale, top_p, min_p = torch.stack([inverse, scale, top_p, min_p], 1).unbind(1)
    top_k, seeds = torch.stack([top_k, torch.arange(len(each)) * 77], 1).unbind(1)
    return SamplingBatch(inverse, scale, top_k, top_p, min_p, seeds, True, True)


def sorted_filter(tempered: Tensor, sampling: SamplingBatch) -> Tensor:
    """The slow twin of `filtered`: the filters over the sorted row."""
    vocab = tempered.shape[-1]
    ordered_ = tempered.sort(-1, descending=True).values
    keep = torch.where(sampling.top_k > 0, sampling.top_k, vocab).clamp_(max=vocab)[:, None, None]
    kth = ordered_.gather(-1, (keep - 1).expand(*tempered.shape[:2], 1))
    mass = ordered_.masked_fill(ordered_ < kth, float("-inf")).softmax(-1)
    before = mass.cumsum(-1) - mass
    share = sampling.top_p[:, None, None]
    kept = (before < share) | (share >= 1)  # `before` may be rounded to 1
    kept &= (mass >= sampling.min_p[:, None, None] * mass[..., :1]) & (ordered_ >= kth)
    kept[..., 0] = True
    last = kept.sum(-1, keepdim=True) - 1
    return tempered.masked_fill(tempered < ordered_.gather(-1, last), float("-inf"))


def plain(logits: Tensor, sampling: SamplingBatch, keys: Tensor, which: Tensor) -> Tensor:
    """What the chosen token maximises, over whole tensors."""
    noise = gumbel(keys, vocabulary_hashes(logits.shape[-1], logits.device), logits.dtype)
    noise = noise.gather(1, which[..., None].expand(*which.shape, noise.shape[-1]))
    tempered = sorted_filter(logits.to(noise.dtype) * sampling.inverse_temperature[:, None, None], sampling)
    return tempered + noise * sampling.noise_scale[:, None, None]


@pytest.mark.parametrize("kept", [0, 1 << 22])
@pytest.mark.parametrize("block", [1, 40, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blockwise_sampling_equals_sampling_over_complete_tensors(
    block: int, kept: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.sampling.row_blocks.MAX_BLOCK", block)
    monkeypatch.setattr("cluster.sampling.noise.MAX_CACHED_VALUES", kept)
    torch.manual_seed(3)
    sampling, r = mixed(dtype), len(MIXED)
    logits = torch.randn(r, 4, 37, dtype=torch.float64).mul(3).to(dtype)
    keys = noise_keys(sampling.seeds, torch.arange(5).expand(r, -1))
    which = torch.randint(5, (r, 4))
    noise = Noise.of(keys, vocabulary_hashes(37, keys.device), dtype)
    assert (noise.cached_values is None) == (not kept)
    got, won = chosen(logits, sampling, noise, which)
    ranked = plain(logits, sampling, keys, which)
    assert torch.equal(got, ranked.argmax(-1))
    assert torch.equal(won, ranked.amax(-1))
    straight, _ = chosen(logits, sampling, noise.at(0, 4))
    assert torch.equal(straight, plain(logits, sampling, keys, torch.arange(4).expand(r, -1)).argmax(-1))
    greedy, _ = chosen(logits, sampling, None)
    assert torch.equal(greedy, logits.argmax(-1))


@pytest.mark.parametrize("block", [1, 1 << 22])
def test_blockwise_top_candidates_equal_the_complete_distribution(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.sampling.row_blocks.MAX_BLOCK", block)
    torch.manual_seed(5)
    sampling, r, ids = mixed(torch.float64), len(MIXED), torch.tensor([3, 5, 8, 13, 21, 34, 55])
    logits = torch.randn(r, 3, len(ids), dtype=torch.float64)
    keys = noise_keys(sampling.seeds, torch.full((r, 1), 9))
    likely, columns = best_of(logits, sampling, Noise.of(keys, token_hashes(ids), torch.float64), 2)
    noise = gumbel(keys, vocabulary_hashes(60, ids.device), torch.float64)[..., ids]
    tempered = sorted_filter(logits * sampling.inverse_temperature[:, None, None], sampling)
    wanted = (tempered + noise * sampling.noise_scale[:, None, None]).log_softmax(-1).topk(2, -1)
    some = wanted.values.isfinite()
    assert torch.equal(columns[some], wanted.indices[some])
    assert torch.allclose(likely[some], wanted.values[some])
    assert bool((likely[~some] < FLOOR).all()), "as unlikely as a tree's candidates get"
    likely, columns = best_of(logits, sampling, None, 2)
    assert torch.allclose(likely, logits.log_softmax(-1).topk(2, -1).values)


@pytest.mark.parametrize("block", [1, 1 << 22])
def test_logprobs_equal_log_softmax_of_the_logits(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.sampling.row_blocks.MAX_BLOCK", block)
    torch.manual_seed(6)
    logits, rows, tokens = torch.randn(9, 50), torch.tensor([7, 0, 0, 8]), torch.tensor([1, 2, 3, 49])
    got, plainly = logprobs(whole(logits), rows, tokens), logits[rows].log_softmax(-1)
    assert torch.allclose(got.chosen, plainly.gather(1, tokens[:, None])[:, 0])
    assert torch.equal(got.ids, plainly.topk(TOP_LOGPROBS, -1).indices)
    assert torch.allclose(got.values, plainly.topk(TOP_LOGPROBS, -1).values)
    few = logprobs(whole(logits[:, :7]), rows, tokens.clamp(max=6))
    assert few.ids.shape == (4, 7), "a vocabulary of fewer than twenty"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ordered_bits_compare_like_their_floats(dtype: torch.dtype) -> None:
    tiny, end = torch.finfo(dtype).smallest_normal, float("inf")
    floats = torch.tensor([-end, -3e38, -2.5, -tiny, -0.0, 0.0, tiny / 4, 1e-3, 7.0, end], dtype=dtype)
    numbers = ordered_bits(floats)
    assert bool((numbers[1:] > numbers[:-1]).all())
    assert torch.equal(ordered_bits(numbers.view(dtype)).view(dtype), floats)


@pytest.mark.parametrize("by", [SortedSelect, RadixSelect])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_search_equals_a_scan_from_the_highest_value(
    by: Callable[[Tensor], ThresholdSearch], dtype: torch.dtype
) -> None:
    """Over values of every size, ties, infinite ones and weights of 0."""
    generator = torch.Generator().manual_seed(8)
    for trial in range(60):
        floats = torch.randn(3, 23, dtype=torch.float64, generator=generator) * 10.0 ** (trial % 9 - 4)
        floats = (floats.round() if trial % 2 else floats).to(dtype)
        floats[0, :3] = float("-inf")
        weights = torch.randint(0, 4, floats.shape, generator=generator)
        weights[:, 5] = 1
        needed = torch.stack([torch.randint(1, int(row.sum()) + 1, (1,), generator=generator) for row in weights])
        got = float_of_ordered_bits(by(ordered_bits(floats)).threshold(needed, weights), dtype)
        for row, weight, need, found in zip(floats, weights, needed, got, strict=True):
            wanted = max(v for v in row.tolist() if int(weight[row >= v].sum()) >= int(need))
            assert float(found) == wanted
        rank = needed.clamp(max=floats.shape[1])
        counted = float_of_ordered_bits(by(ordered_bits(floats)).threshold(rank), dtype)
        assert torch.equal(counted, floats.sort(1, descending=True).values.gather(1, rank - 1))


@pytest.mark.parametrize("few", [0, 1 << 30])
@pytest.mark.parametrize("vocab", [2, 7, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_filters_equal_filters_over_sorted_rows(
    vocab: int, dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.sampling.radix_select.SORT_LIMIT", few)
    torch.manual_seed(vocab)
    sampling = mixed(dtype)
    for scale in (0.1, 2.0, 30.0):
        tempered = torch.randn(len(MIXED), 3, vocab, dtype=dtype) * scale
        assert torch.equal(filtered(tempered, sampling), sorted_filter(tempered, sampling))
        tied = tempered.round()
        assert torch.equal(filtered(tied, sampling), sorted_filter(tied, sampling))


@pytest.mark.parametrize("kept", [0, 1 << 22])
def test_noise_slices_equal_slices_of_the_complete_noise(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests, of positions, of tokens, in any order: kept or made anew, the same bits."""
    monkeypatch.setattr("cluster.sampling.noise.MAX_CACHED_VALUES", kept)
    monkeypatch.setattr("cluster.sampling.row_blocks.MAX_BLOCK", 100)
    generator = torch.Generator().manual_seed(4)
    keys = noise_keys(torch.arange(5), torch.arange(4).expand(5, -1))
    hashes = vocabulary_hashes(30, keys.device)
    noise, every = Noise.of(keys, hashes, torch.float32), gumbel(keys, hashes, torch.float32)
    assert torch.equal(noise.values(), every)
    assert torch.equal(noise.narrow(slice(1, 4)).at(1, 2).values(), every[1:4, 1:3])
    which, ids = torch.randint(4, (5, 7), generator=generator), torch.randperm(30, generator=generator)[:11]
    assert torch.equal(noise.values(which), every.gather(1, which[..., None].expand(-1, -1, 30)))
    assert torch.equal(noise.over(ids, token_hashes(ids)).at(2).values(), every[:, 2:3, ids])
    picked = noise.pick(which[:, 0]).over(ids, token_hashes(ids)).values()
    assert torch.equal(picked, every[torch.arange(5), which[:, 0]][:, None, ids])
    assert noise.narrow(slice(5, None)).values().shape == (0, 4, 30)


def test_non_finite_row_gets_a_non_finite_score_and_changes_no_other_row() -> None:
    """Its score tells the engine to end the request; rows beside it keep their bits."""
    torch.manual_seed(2)
    sampling, r = mixed(torch.float32), len(MIXED)
    logits = torch.randn(r, 2, 30)
    keys = noise_keys(sampling.seeds, torch.arange(2).expand(r, -1))
    noise = Noise.of(keys, vocabulary_hashes(30, keys.device), torch.float32)
    tokens, scores = chosen(logits, sampling, noise)
    for bad in (float("nan"), float("inf")):
        spoiled = logits.clone()
        spoiled[:, 1, 4] = bad
        got, won = chosen(spoiled, sampling, noise)
        assert torch.equal(got[:, 0], tokens[:, 0]) and torch.equal(won[:, 0], scores[:, 0])
        assert not won[:, 1].isfinite().any()


class Peak(TorchDispatchMode):
    """The most bytes held at once beside what is `given`; a storage lives as long as a tensor on it does."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self._given = given.untyped_storage()._cdata
        self.now = self.most = 0
        self._tensors: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor) and not any(tensor is arg for arg in args):
                self._note(tensor)
        return made

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        at, size = storage._cdata, storage.nbytes()
        if at == self._given:
            return
        if not self._tensors[at]:
            self.now += size
            self.most = max(self.most, self.now)
        self._tensors[at] += 1
        weakref.finalize(tensor, self._gone, at, size)

    def _gone(self, at: int, size: int) -> None:
        self._tensors[at] -= 1
        self.now -= size * (not self._tensors[at])


class Alone:
    """Stands for n shards that all found what this one did; `over_world` ones have no rows of other groups."""

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
        pytest.param(None, id="whole"),
        pytest.param(Alone(2, True), id="world"),
        pytest.param(Alone(2, False), id="group", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("filtering", [False, True])
def test_sampling_64_trees_uses_under_a_tenth_of_the_logits_memory(
    filtering: bool, shards: Alone | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R 64, N 64, V 128k on meta tensors, log-probabilities included; of the filters' many blocks only the first. A
    tenth of a shard's own logits where there are two.
    """
    true, done = filters.thresholds, list[Tensor]()

    def first(rows: LogitRows, *given: Tensor) -> Tensor:
        done[:] = done or [true(rows, *given)]
        return given[0]

    monkeypatch.setattr(filters, "thresholds", first)
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
    with Peak(logits) as choosing:
        noise = Noise.of(keys, hashes, torch.float32)
        columns = ShardedLogits(logits, vocab, shards=shards)
        tokens, _ = choose(columns, [SamplingInputs(n, sampling, noise.at(0, steps + 1), depths)])
        rows = torch.empty(r * (steps + 1), dtype=torch.int64, device=meta)
        logprobs(columns, rows, tokens[: r * (steps + 1)])
    assert 0 < choosing.most < 0.1 * logits.nbytes, f"{choosing.most / logits.nbytes:.2f} of the logits"
    drafted = torch.empty(r * topk, width, device=meta)
    with Peak(drafted) as drafting:
        top_logprobs(ShardedLogits(drafted, vocab, shards=shards), SamplingInputs(topk, sampling, noise.at(0)), topk)
    assert 0 < drafting.most < 0.1 * logits.nbytes, f"{drafting.most / logits.nbytes:.2f} of the target's logits"
