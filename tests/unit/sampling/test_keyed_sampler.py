"""Keyed noise and filters against naive implementations, and drawn tokens against their distribution."""

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
from tests.unit.sampling.samplings import apply_filters, chosen, sampling_of, single_rank_logits

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
    """Return the noise `[B, n, V]` of requests with `seeds` `[B]` at `positions` `[B, n]`."""
    return gumbel(noise_keys(seeds, positions), vocabulary_hashes(vocab, seeds.device), dtype)


def noise_of_keys(keys: torch.Tensor, vocab: int, dtype: torch.dtype = torch.float64) -> Noise:
    """Return the noise of `vocab` tokens under `keys`."""
    return Noise.of(keys, vocabulary_hashes(vocab, keys.device), dtype)


def naive_filter(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that the filters leave in one row of tempered logits."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    candidates = order[:top_k] if top_k else order
    weights = np.exp(logits[candidates] - logits.max())
    mass = weights / weights.sum()
    result, cumulative_mass = [], 0.0
    for token, p in zip(candidates, mass, strict=True):
        if (cumulative_mass >= top_p or p < min_p * mass[0]) and result:
            break
        result.append(token)
        cumulative_mass += p
    return set(result)


@pytest.mark.parametrize("options", FILTERS[2:])
@pytest.mark.parametrize("vocab", [2, 7, 50])
def test_filters_equal_a_naive_implementation(options: dict[str, float], vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(40, 3, vocab, dtype=torch.float64) * 2
    filtered_logits = apply_filters(logits, sampling_of(40, **options))
    filter_arguments = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | {
        k: v for k, v in options.items() if k != "temperature"
    }
    for row, filtered_row in zip(logits.view(-1, vocab), filtered_logits.view(-1, vocab), strict=True):
        allowed = {i for i, value in enumerate(filtered_row.tolist()) if value > float("-inf")}
        assert allowed == naive_filter(row.numpy(), **filter_arguments)  # type: ignore[arg-type]
        assert all(filtered_row[i] == row[i] for i in allowed)


def test_filters_always_keep_the_most_likely_token() -> None:
    logits = torch.zeros(1, 1, 8, dtype=torch.float64)
    logits[..., 3] = 0.1
    for options in ({"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}):
        assert apply_filters(logits, sampling_of(1, **options)).argmax() == 3


def test_disabled_filters_keep_tokens_of_negligible_probability() -> None:
    """A request without filters can be in a batch with filtered requests, for which the step sums probabilities."""
    logits = torch.tensor([[[0.0, -100.0, -200.0]]], dtype=torch.float64)
    assert apply_filters(logits, sampling_of(1)).isfinite().all()


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
    filtered_logits = apply_filters(tempered[None, None], sampling_of(1, **options))
    return filtered_logits[0, 0].softmax(-1).numpy()


def fits_distribution(counts: np.ndarray, p: np.ndarray, tests: int) -> bool:
    """Return whether `counts` pass a chi-square test for the distribution `p`.

    The level is SIGNIFICANCE over all `tests` tests (Bonferroni). Tokens of probability 0 must not occur.
    """
    assert counts[p == 0].sum() == 0
    inside = p > 0
    if inside.sum() == 1:
        return True
    return stats.chisquare(counts[inside], p[inside] * counts.sum()).pvalue > SIGNIFICANCE / tests


class TableModels:
    """A target and a draft that are tables of logits: the next token depends only on the last token."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.target = torch.randn(VOCAB, VOCAB, dtype=torch.float64) * 1.5
        self.drafted = self.target + torch.randn(VOCAB, VOCAB, dtype=torch.float64)

    def step(self, seeds: torch.Tensor, options: dict[str, float], topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft two levels after token 0 at position 4 and verify them; return tokens `[R, 3]` and accept lengths.

        Ranking, tree, choice and accept are product code. Tokens beyond the accept length are not committed.
        """
        r, shape = len(seeds), TreeShape(num_steps=2, topk=topk, num_draft_tokens=min(7, 1 + topk + topk * topk))
        sampling = sampling_of(r, seeds, **options)
        noise = noise_of_keys(noise_keys(seeds, torch.arange(5, 9).expand(r, -1)), VOCAB)
        ranking = CoupledRanking(torch.arange(VOCAB), topk)
        root = self.drafted[torch.zeros(r, 1, dtype=torch.int64)]
        first_log_probs, first = ranking.propose(single_rank_logits(root), SamplingInputs(1, sampling, noise.at(0)))
        second_log_probs, second = ranking.propose(
            single_rank_logits(self.drafted[first[:, 0]]), SamplingInputs(topk, sampling, noise.at(1))
        )
        growth = TorchGrowth(first[:, 0], first_log_probs[:, 0], 2)
        growth.add(second, second_log_probs)
        root_tokens = torch.zeros(r, dtype=torch.int64)
        tree = growth.tree(root_tokens, shape.num_draft_tokens)
        target_tokens, _ = chosen(self.target[tree.tokens], sampling, noise, tree.depths)
        accepted = accept(tree, target_tokens, root_tokens[:0], 2)
        return accepted.tokens, accepted.accept_len


@pytest.mark.parametrize(
    ("options", "topk"),
    [
        pytest.param(options, topk, id=f"{topk}-{options}", marks=[] if (options, topk) in FAST else SLOW)
        for options in FILTERS
        for topk in (1, 3)
    ],
)
def test_speculative_draws_fit_the_filtered_target_distribution(
    options: dict[str, float], topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square tests of first tokens, and of second tokens after each of the four most likely first tokens.

    Filters search by sorting, which is faster for so few columns. The mean accept length shows that the trees' tokens
    are accepted.
    """
    monkeypatch.setattr("cluster.sampling.radix_select.SORT_LIMIT", 1 << 30)
    tables, tests = TableModels(), len(FILTERS) * 2 * 12
    tokens, accept_lens = [], []
    for part in range(10):
        seeds = torch.arange(part * 10_000, (part + 1) * 10_000) * 2_654_435_761 + 17
        part_tokens, count = tables.step(seeds, options, topk)
        tokens.append(part_tokens)
        accept_lens.append(count)
    drawn, count = torch.cat(tokens), torch.cat(accept_lens)
    assert count.double().mean() > 1.3, "speculation must accept some drafted tokens"
    first = distribution(tables.target[0], options)
    assert fits_distribution(np.bincount(drawn[:, 0], minlength=VOCAB), first, tests)
    tested_first_tokens = 0
    for first_token in np.argsort(first)[-4:]:
        is_selected = (drawn[:, 0] == int(first_token)) & (count >= 2)
        if int(is_selected.sum()) < 2_000:
            continue
        second = distribution(tables.target[int(first_token)], options)
        second_tokens = reference_second(tables, options, int(first_token), drawn, count)
        assert fits_distribution(np.bincount(second_tokens, minlength=VOCAB), second, tests)
        tested_first_tokens += 1
    assert tested_first_tokens > 0, "no first token has enough second tokens for a test"


def reference_second(
    tables: TableModels, options: dict[str, float], first_token: int, drawn: torch.Tensor, count: torch.Tensor
) -> np.ndarray:
    """Return the second token of every request whose first token is `first_token`.

    The tree has committed it, or else the next step commits it at its root. A fair sample needs both: whether the tree
    commits a token depends on the token.
    """
    rows = (drawn[:, 0] == first_token).nonzero()[:, 0]
    seeds = rows * 2_654_435_761 + 17
    keys = noise_keys(seeds, torch.full((len(rows), 1), 6))
    logits = tables.target[torch.full((len(rows), 1), first_token)]
    second_tokens = chosen(logits, sampling_of(len(rows), seeds, **options), noise_of_keys(keys, VOCAB))[0][:, 0]
    committed = count[rows] >= 2
    assert torch.equal(second_tokens[committed], drawn[rows, 1][committed]), (
        "the tree must commit the token of plain decoding"
    )
    return second_tokens.numpy()


def test_draws_of_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of tokens at neighbouring positions, or of neighbouring seeds, fit the product of their distributions."""
    p = torch.tensor([0.35, 0.25, 0.2, 0.1, 0.06, 0.04], dtype=torch.float64)
    logits = p.log().expand(50_000, 2, -1)
    for seeds, positions in (
        (torch.arange(50_000), torch.tensor([9, 10])),
        (torch.arange(50_000) << 32, torch.tensor([0, 1])),
        (torch.full((50_000,), 12), None),
    ):
        position_pairs = torch.arange(100_000).view(-1, 2) if positions is None else positions.expand(50_000, -1)
        drawn, _ = chosen(logits, sampling_of(50_000, seeds), noise_of_keys(noise_keys(seeds, position_pairs), 6))
        pairs = np.bincount(drawn[:, 0] * 6 + drawn[:, 1], minlength=36)
        assert fits_distribution(pairs, np.outer(p, p).ravel(), 6)
        rolled = np.bincount(drawn[1:, 0] * 6 + drawn[:-1, 0], minlength=36)
        assert fits_distribution(rolled, np.outer(p, p).ravel(), 6)


def test_noise_keys_equal_a_splitmix64_reference() -> None:
    """SplitMix64 mixes integers that wrap in the same way on every machine. A change of the keys changes the tokens
    that a seed gives.

    The seeds include neighbours, seeds that differ only in high bits, and seeds which once had the noise of another
    seed at the next position.
    """
    related_seeds = [*range(40), *(n << 32 for n in range(40)), *(n * 0x27D4EB2F for n in range(40))]
    seeds, positions = [*related_seeds, 2**62, 2**63 - 1], [0, 1, 5, 6, 2047, 2**20, 2**31 - 1]
    keys = noise_keys(torch.tensor(seeds), torch.tensor(positions).expand(len(seeds), -1)).tolist()
    assert keys == [[splitmix_key(seed, position) for position in positions] for seed in seeds]


def splitmix_key(seed: int, position: int) -> int:
    """Return the noise key of a seed at a position, in Python integers, from SplitMix64's description."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) % 2**64) + position * golden) % 2**64)
    return key - 2**64 if key >= 2**63 else key


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gumbel_noise_is_finite_for_extreme_bits(dtype: torch.dtype) -> None:
    edge_bits = torch.arange(4096, dtype=torch.int32)
    noise = gumbel_of(torch.cat([edge_bits, 0x7FFFFFFF - edge_bits]), dtype)
    assert noise.isfinite().all() and noise.min() > -25 and noise.max() < 25
    assert noise[0] > 20 and noise[4096] < -2, "extreme bits must give extreme noise on the same side"
