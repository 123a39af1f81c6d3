"""Keyed noise and the filters against naive versions; draws against the distribution they come from."""

import numpy as np
import pytest
import torch
from scipy import stats

from cluster.config.tree_shape import TreeShape
from cluster.sampling.noise import Noise, gumbel, gumbel_of, noise_keys, vocabulary_hashes
from cluster.sampling.sampling_inputs import SamplingInputs
from cluster.spec.propose import CoupledRanking
from cluster.spec.tree import TorchGrowth
from cluster.spec.verify import accept
from tests.unit.sampling.samplings import chosen, filtered, sampling_of, whole

FILTERS = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.03},
]
VOCAB = 12
SIGNIFICANCE = 0.001
SLOW = [pytest.mark.slow]
FAST = [(FILTERS[0], 3), (FILTERS[-1], 1)]


def noise_of(seeds: torch.Tensor, positions: torch.Tensor, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Noise `[B, n, V]` of requests with `seeds` `[B]` at `positions` `[B, n]`."""
    return gumbel(noise_keys(seeds, positions), vocabulary_hashes(vocab, seeds.device), dtype)


def noise_under(keys: torch.Tensor, vocab: int, dtype: torch.dtype = torch.float64) -> Noise:
    """The noise of `vocab` tokens under `keys`."""
    return Noise.of(keys, vocabulary_hashes(vocab, keys.device), dtype)


def naive_filter(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn from one row of tempered logits."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[:top_k] if top_k else order
    weights = np.exp(logits[kept] - logits.max())
    mass = weights / weights.sum()
    result, before = [], 0.0
    for token, p in zip(kept, mass, strict=True):
        if (before >= top_p or p < min_p * mass[0]) and result:
            break
        result.append(token)
        before += p
    return set(result)


@pytest.mark.parametrize("options", FILTERS[2:])
@pytest.mark.parametrize("vocab", [2, 7, 50])
def test_filters_equal_a_naive_implementation(options: dict[str, float], vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(40, 3, vocab, dtype=torch.float64) * 2
    kept = filtered(logits, sampling_of(40, **options))
    wanted = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | {k: v for k, v in options.items() if k != "temperature"}
    for row, out in zip(logits.view(-1, vocab), kept.view(-1, vocab), strict=True):
        allowed = {i for i, value in enumerate(out.tolist()) if value > float("-inf")}
        assert allowed == naive_filter(row.numpy(), **wanted)  # type: ignore[arg-type]
        assert all(out[i] == row[i] for i in allowed)


def test_filters_always_keep_the_most_likely_token() -> None:
    logits = torch.zeros(1, 1, 8, dtype=torch.float64)
    logits[..., 3] = 0.1
    for options in ({"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}):
        assert filtered(logits, sampling_of(1, **options)).argmax() == 3


def test_disabled_filters_keep_tokens_of_negligible_probability() -> None:
    """Such a request may run beside requests with filters, for which the step counts mass."""
    logits = torch.tensor([[[0.0, -100.0, -200.0]]], dtype=torch.float64)
    assert filtered(logits, sampling_of(1)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_noise_is_standard_gumbel(dtype: torch.dtype) -> None:
    noise = noise_of(torch.arange(40) * 7919, torch.arange(50).expand(40, -1), 500, dtype).double().flatten()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(np.euler_gamma, abs=0.005)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, rel=0.01)
    assert stats.kstest(noise[:100_000].numpy(), "gumbel_r").pvalue > SIGNIFICANCE
    for tail in (6, 10):
        expected = len(noise) * -np.expm1(-np.exp(-tail))
        assert abs(int((noise > tail).sum()) - expected) < 5 * expected**0.5


def test_noise_depends_only_on_seed_position_and_token() -> None:
    seeds = torch.tensor([3, 3 + 2**32, 2**62, 3])
    positions = torch.tensor([[5, 6], [5, 6], [5, 6], [6, 7]])
    noise = noise_of(seeds, positions, 100, torch.float64)
    assert torch.equal(noise[0, 1], noise[3, 0])
    assert torch.equal(noise_of(seeds[2:3], positions[2:3, 1:], 40, torch.float64)[0, 0], noise[2, 1, :40])
    distinct = noise[[0, 0, 1, 1, 2, 2, 3], [0, 1, 0, 1, 0, 1, 1]]
    corr = np.corrcoef(distinct.numpy()) - np.eye(7)
    assert np.abs(corr).max() < 0.45
    assert len(distinct.unique()) == distinct.numel()


def distribution(logits: torch.Tensor, options: dict[str, float]) -> np.ndarray:
    tempered = logits / options.get("temperature", 1.0)
    kept = filtered(tempered[None, None], sampling_of(1, **options))
    return kept[0, 0].softmax(-1).numpy()


def fits(counts: np.ndarray, p: np.ndarray, tests: int) -> bool:
    """Chi-square at SIGNIFICANCE over `tests` tests (Bonferroni); nothing outside the support."""
    assert counts[p == 0].sum() == 0
    inside = p > 0
    if inside.sum() == 1:
        return True
    return stats.chisquare(counts[inside], p[inside] * counts.sum()).pvalue > SIGNIFICANCE / tests


class Tables:
    """A target and a draft that are tables: the next token depends on the last one alone."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.target = torch.randn(VOCAB, VOCAB, dtype=torch.float64) * 1.5
        self.drafted = self.target + torch.randn(VOCAB, VOCAB, dtype=torch.float64)

    def step(self, seeds: torch.Tensor, options: dict[str, float], topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two drafted levels and one verification after token 0 at position 4: tokens `[R, 3]` and accept lengths.

        Ranking, tree, choice and accept are the engine's own; rows beyond the accept length are not committed.
        """
        r, shape = len(seeds), TreeShape(num_steps=2, topk=topk, num_draft_tokens=min(7, 1 + topk + topk * topk))
        sampling = sampling_of(r, seeds, **options)
        noise = noise_under(noise_keys(seeds, torch.arange(5, 9).expand(r, -1)), VOCAB)
        ranking = CoupledRanking(torch.arange(VOCAB), topk)
        root = self.drafted[torch.zeros(r, 1, dtype=torch.int64)]
        first_p, first = ranking.propose(whole(root), SamplingInputs(1, sampling, noise.at(0)))
        second_p, second = ranking.propose(
            whole(self.drafted[first[:, 0]]), SamplingInputs(topk, sampling, noise.at(1))
        )
        grown = TorchGrowth(first[:, 0], first_p[:, 0], 2)
        grown.add(second, second_p)
        none = torch.zeros(r, dtype=torch.int64)
        tree = grown.tree(none, shape.num_draft_tokens)
        own, _ = chosen(self.target[tree.tokens], sampling, noise, tree.depths)
        accepted = accept(tree, own, none[:0], 2)
        return accepted.tokens, accepted.accept_len


@pytest.mark.parametrize(
    ("options", "topk"),
    [
        pytest.param(options, topk, id=f"{topk}-{options}", marks=[] if (options, topk) in FAST else SLOW)
        for options in FILTERS
        for topk in (1, 3)
    ],
)
def test_speculative_draws_fit_the_filtered_target_distribution(options: dict[str, float], topk: int) -> None:
    """First tokens, second tokens given the first, and pairs: chi-square, over trees that really accept."""
    tables, tests = Tables(), len(FILTERS) * 2 * 12
    tokens, lens = [], []
    for part in range(10):
        seeds = torch.arange(part * 10_000, (part + 1) * 10_000) * 2_654_435_761 + 17
        some, count = tables.step(seeds, options, topk)
        tokens.append(some)
        lens.append(count)
    drawn, count = torch.cat(tokens), torch.cat(lens)
    assert count.double().mean() > 1.3, "speculation was on"
    first = distribution(tables.target[0], options)
    assert fits(np.bincount(drawn[:, 0], minlength=VOCAB), first, tests)
    for before in np.argsort(first)[-4:]:
        followed = (drawn[:, 0] == int(before)) & (count >= 2)
        if int(followed.sum()) < 2_000:
            continue
        second = distribution(tables.target[int(before)], options)
        plain = reference_second(tables, options, int(before), drawn, count)
        assert fits(np.bincount(plain, minlength=VOCAB), second, tests)


def reference_second(
    tables: Tables, options: dict[str, float], before: int, drawn: torch.Tensor, count: torch.Tensor
) -> np.ndarray:
    """Second tokens after `before`: committed by the tree where it got that far, else by the next step's root.

    Only both together are a fair sample: which ones the tree committed depends on what they are.
    """
    at = (drawn[:, 0] == before).nonzero()[:, 0]
    seeds = at * 2_654_435_761 + 17
    keys = noise_keys(seeds, torch.full((len(at), 1), 6))
    logits = tables.target[torch.full((len(at), 1), before)]
    own = chosen(logits, sampling_of(len(at), seeds, **options), noise_under(keys, VOCAB))[0][:, 0]
    committed = count[at] >= 2
    assert torch.equal(own[committed], drawn[at, 1][committed]), "the tree draws what plain decoding would"
    return own.numpy()


def test_draws_of_neighbouring_positions_and_seeds_are_independent() -> None:
    """Draws at neighbouring positions, and of neighbouring seeds, fit the product of their distributions."""
    p = torch.tensor([0.35, 0.25, 0.2, 0.1, 0.06, 0.04], dtype=torch.float64)
    logits = p.log().expand(50_000, 2, -1)
    for seeds, positions in (
        (torch.arange(50_000), torch.tensor([9, 10])),
        (torch.arange(50_000) << 32, torch.tensor([0, 1])),
        (torch.full((50_000,), 12), None),
    ):
        at = torch.arange(100_000).view(-1, 2) if positions is None else positions.expand(50_000, -1)
        drawn, _ = chosen(logits, sampling_of(50_000, seeds), noise_under(noise_keys(seeds, at), 6))
        pairs = np.bincount(drawn[:, 0] * 6 + drawn[:, 1], minlength=36)
        assert fits(pairs, np.outer(p, p).ravel(), 6)
        rolled = np.bincount(drawn[1:, 0] * 6 + drawn[:-1, 0], minlength=36)
        assert fits(rolled, np.outer(p, p).ravel(), 6)


def test_noise_keys_equal_a_splitmix64_reference() -> None:
    """Integers that wrap alike on every machine, mixed by SplitMix64. A change of them changes what seeds give.

    Also those of seeds that are neighbours, differ in high bits alone, or once repeated another's noise a position on.
    """
    near = [*range(40), *(n << 32 for n in range(40)), *(n * 0x27D4EB2F for n in range(40))]
    seeds, positions = [*near, 2**62, 2**63 - 1], [0, 1, 5, 6, 2047, 2**20, 2**31 - 1]
    keys = noise_keys(torch.tensor(seeds), torch.tensor(positions).expand(len(seeds), -1)).tolist()
    assert keys == [[mixed(seed, position) for position in positions] for seed in seeds]


def mixed(seed: int, position: int) -> int:
    """The key in whole numbers, written from SplitMix64's description."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) % 2**64) + position * golden) % 2**64)
    return key - 2**64 if key >= 2**63 else key


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gumbel_noise_is_finite_for_extreme_bits(dtype: torch.dtype) -> None:
    ends = torch.arange(4096, dtype=torch.int32)
    noise = gumbel_of(torch.cat([ends, 0x7FFFFFFF - ends]), dtype)
    assert noise.isfinite().all() and noise.min() > -25 and noise.max() < 25
    assert noise[0] > 20 and noise[4096] < -2, "the rarest draws keep their side"
