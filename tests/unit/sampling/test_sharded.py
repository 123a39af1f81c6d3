"""Ranks that share a vocabulary choose the same tokens, with the same thresholds, as one rank with all of it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.batch import SamplingMode
from cluster.sampling.c_sampler import CSampler
from cluster.sampling.noise import Noise, gumbel_of, noise_keys, token_hashes, vocabulary_hashes
from cluster.sampling.sampler import TOP_LOGPROBS, Logprobs, choose, logprobs, ranks, top_logprobs
from cluster.sampling.sampling_inputs import SamplingInputs, checksum
from cluster.sampling.sharded import NUMBERS_PER_CHOICE, numbers_sent_per_row, sampler_input_of
from cluster.sampling.torch_sampler import FILTERED_PENALTY, TORCH, Sampler
from cluster.spec.propose import CoupledRanking
from tests.support.pairwise import covering
from tests.unit.kernels.library import c_library
from tests.unit.sampling.samplings import sampling_of, single_rank_logits
from tests.unit.sampling.shards import CPU, Grid, Group, RankContext, head_of, run_on_grid, sampling

GRIDS = [
    Grid(1, 1, False),
    pytest.param(Grid(2, 1, False), marks=pytest.mark.slow),
    Grid(3, 1, False),
    pytest.param(Grid(4, 1, False), marks=pytest.mark.slow),
    Grid(2, 2, False),
    pytest.param(Grid(1, 2, True), marks=pytest.mark.slow),
    Grid(1, 3, True),
    Grid(2, 2, True),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ALL_MODES = SamplingMode.RANDOM | SamplingMode.FILTERED


MODES = {"greedy": SamplingMode(0), "sampled": SamplingMode.RANDOM, "filtered": ALL_MODES}
SAMPLERS = ["torch", "c"]


@pytest.fixture(params=SAMPLERS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """Each sampler under test: torch and C."""
    return TORCH if request.param == "torch" else CSampler(c_library())


def cases(*axes: Sequence[Any]) -> list[Any]:
    """Return every grid with every combination of values of `axes`. Outside a covering array they are slow."""
    fast = covering([[grid for grid in GRIDS if isinstance(grid, Grid)], *axes])
    grids = [grid if isinstance(grid, Grid) else grid.values[0] for grid in GRIDS]
    return [
        pytest.param(*row, id="-".join(map(str, row)), marks=() if row in fast else pytest.mark.slow)
        for row in product(grids, *axes)
    ]


def equal_bits(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def groups_of(grid: Grid, dtype: torch.dtype, mode: SamplingMode, trial: int) -> list[Group]:
    torch.manual_seed(trial)
    rng = random.Random(trial)
    vocab, nodes = rng.choice((2, 5, 7, 29, 64, 257)), rng.randrange(1, 5)
    return [Group.random(vocab, nodes, dtype, mode, rng) for _ in range(grid.dp)]


@pytest.mark.parametrize(
    ("grid", "dtype", "mode", "sampler"), cases(DTYPES, list(MODES), SAMPLERS), indirect=["sampler"]
)
def test_sharded_sampling_equals_single_rank_sampling(
    grid: Grid, dtype: torch.dtype, mode: str, sampler: Sampler
) -> None:
    """All bits are equal, for any number of rows, uneven vocabularies, ties and non-finite logits."""
    for trial in range(3):
        groups = groups_of(grid, dtype, MODES[mode], trial)
        vocab = groups[0].logits.shape[1]

        def rank(rank_context: RankContext, groups: list[Group] = groups) -> tuple[Tensor, Tensor]:
            return choose(rank_context.columns, groups[rank_context.group].of_shard(rank_context.columns), sampler)

        results = run_on_grid(
            grid,
            [g.logits for g in groups],
            head_of(grid, vocab, dtype).sampling_calls(MODES[mode], NUMBERS_PER_CHOICE),
            rank,
        )
        for rank_index, (tokens, scores) in enumerate(results):
            group = groups[rank_index // grid.tp]
            expected_tokens, expected_scores = choose(single_rank_logits(group.logits), group.draws, sampler)
            assert torch.equal(tokens, expected_tokens) and equal_bits(scores, expected_scores), trial


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_sharded_filter_thresholds_equal_unsharded_thresholds(grid: Grid, dtype: torch.dtype) -> None:
    """Rows with NaN or +inf are left out: that token is chosen with any threshold."""
    for trial in range(4):
        groups = groups_of(grid, dtype, ALL_MODES, 100 + trial)
        head = head_of(grid, groups[0].logits.shape[1], dtype)

        def rank(rank_context: RankContext, groups: list[Group] = groups) -> Tensor:
            thresholds = sampler_input_of(
                rank_context.columns, groups[rank_context.group].of_shard(rank_context.columns)
            ).thresholds
            assert thresholds is not None
            return thresholds

        calls = [call for call in head.sampling_calls(ALL_MODES, NUMBERS_PER_CHOICE) if call[0] != "compare"]
        for rank_index, thresholds in enumerate(run_on_grid(grid, [g.logits for g in groups], calls, rank)):
            scored_groups = groups if grid.wide else [groups[rank_index // grid.tp]]
            finite_rows = torch.cat([group.logits for group in scored_groups]).amax(1).isfinite()
            assert equal_bits(
                thresholds[finite_rows], torch.cat([group.thresholds() for group in scored_groups])[finite_rows]
            ), trial


def top_columns(log_probs: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` highest values of each row. In a tie the lower column is first."""
    return log_probs.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@pytest.mark.parametrize(
    ("grid", "mode", "mapped", "sampler"), cases(list(MODES), [False, True], SAMPLERS), indirect=["sampler"]
)
def test_sharded_draft_proposals_equal_single_rank_proposals(
    grid: Grid, mode: str, mapped: bool, sampler: Sampler
) -> None:
    """Some cases have a reduced vocabulary, whose tokens belong to other shards of the target, or shards with fewer
    columns than are proposed."""
    dtype = torch.float64
    for trial in range(3):
        torch.manual_seed(trial)
        rng = random.Random(trial)
        vocab, topk, rows_per_request = rng.choice((4, 7, 29, 90)), rng.choice((1, 2, 4)), rng.randrange(1, 4)
        ids = torch.arange(vocab) * 3 + trial % 3 if mapped else torch.arange(vocab)
        ranking, groups, logits = CoupledRanking(ids, topk, None, sampler), [], []
        for _ in range(grid.dp):
            batch = sampling(rng.randrange(4), dtype, MODES[mode], rng)
            keys = noise_keys(batch.seeds, torch.full((batch.seeds.shape[0], 1), 9))
            noise = (
                Noise.of(keys, vocabulary_hashes(3 * vocab, CPU), dtype) if SamplingMode.RANDOM in MODES[mode] else None
            )
            groups.append(SamplingInputs(rows_per_request, batch, noise))
            logits.append(torch.randn(batch.seeds.shape[0] * rows_per_request, vocab, dtype=dtype) * 3)

        def rank(
            rank_context: RankContext, groups: list[SamplingInputs] = groups, ids: Tensor = ids, topk: int = topk
        ) -> tuple[Tensor, Tensor]:
            draw, (start, count) = (
                groups[rank_context.group],
                (rank_context.columns.start, rank_context.columns.values.shape[1]),
            )
            local_ids = ids[start : start + count]
            local_ids = torch.cat([local_ids, local_ids.new_zeros(count - local_ids.shape[0])])
            if draw.noise is not None and rank_context.columns.shards is not None:
                draw = replace(draw, noise=Noise(draw.noise.keys, vocabulary_hashes(count, CPU, start), dtype))
            return CoupledRanking(ids, topk, local_ids, sampler).propose(rank_context.columns, draw)

        head = head_of(grid, vocab, dtype)
        results = run_on_grid(
            grid, logits, head.sampling_calls(MODES[mode], numbers_sent_per_row(topk, head.columns)), rank
        )
        for rank_index, (log_probs, tokens) in enumerate(results):
            group = rank_index // grid.tp
            expected_log_probs, expected_tokens = ranking.propose(single_rank_logits(logits[group]), groups[group])
            assert torch.equal(tokens, expected_tokens), trial
            assert log_probs.dtype == expected_log_probs.dtype and torch.allclose(
                log_probs, expected_log_probs, rtol=1e-12
            )


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_sharded_proposals_order_ties_and_non_finite_values_like_one_rank(grid: Grid, sampler: Sampler) -> None:
    """In a tie the lower column is first. A row that is not finite gets its first columns, as on one rank."""
    torch.manual_seed(1)
    vocab, topk = 11, 4
    logits = [torch.randn(6, vocab, dtype=torch.float64).round() for _ in range(grid.dp)]
    for rows in logits:
        rows[3, 7], rows[4, 7], rows[5, :] = float("inf"), float("nan"), float("-inf")
    draw, head = SamplingInputs(6, sampling_of(1), None), head_of(grid, vocab, torch.float64)
    calls = head.sampling_calls(SamplingMode(0), numbers_sent_per_row(topk, head.columns))
    for rank_index, (log_probs, columns) in enumerate(
        run_on_grid(grid, logits, calls, lambda rank_context: top_logprobs(rank_context.columns, draw, topk, sampler))
    ):
        expected = logits[rank_index // grid.tp].log_softmax(-1)
        assert torch.equal(columns[:3], top_columns(expected[:3], topk))
        assert torch.allclose(log_probs[:3], expected[:3].gather(1, columns[:3]))
        single_rank_log_probs, single_rank_columns = top_logprobs(
            single_rank_logits(logits[rank_index // grid.tp]), draw, topk, sampler
        )
        assert log_probs[3:].isnan().all() and single_rank_log_probs[3:].isnan().all()
        assert columns[3:].tolist() == single_rank_columns[3:].tolist() == [list(range(topk))] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_sharded_logprobs_equal_unsharded_logprobs(grid: Grid, dtype: torch.dtype) -> None:
    for trial, vocab in enumerate((3, 21, 50, 130)):
        torch.manual_seed(trial)
        logits = [torch.randn(5 + group, vocab, dtype=torch.float64).to(dtype) for group in range(grid.dp)]
        rows = [torch.randint(5 + group, (4,)) for group in range(grid.dp)]
        tokens = [torch.randint(vocab, (4,)) for _ in range(grid.dp)]
        calls = head_of(grid, vocab, dtype).logprob_calls(TOP_LOGPROBS)

        def rank(rank_context: RankContext, rows: list[Tensor] = rows, tokens: list[Tensor] = tokens) -> Logprobs:
            return logprobs(rank_context.columns, rows[rank_context.group], tokens[rank_context.group])

        for rank_index, actual in enumerate(run_on_grid(grid, logits, calls, rank, rows_per_group=4)):
            group = rank_index // grid.tp
            expected = logprobs(single_rank_logits(logits[group]), rows[group], tokens[group])
            assert actual.chosen.dtype == expected.chosen.dtype and torch.allclose(actual.chosen, expected.chosen)
            assert torch.allclose(actual.values, expected.values)
            assert torch.equal(actual.ids, expected.ids), "also with the ties of bfloat16"
            expected_log_probs = logits[group][rows[group]].to(expected.values.dtype).log_softmax(-1)
            assert torch.allclose(expected_log_probs.gather(1, actual.ids), actual.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_sharded_token_ranks_equal_unsharded_token_ranks(grid: Grid, dtype: torch.dtype) -> None:
    """The rank of a token is the number of tokens at least as likely as it, itself included."""
    for trial, vocab in enumerate((3, 21, 130)):
        torch.manual_seed(trial)
        logits = [torch.randn(5, vocab, dtype=torch.float64).to(dtype) for _ in range(grid.dp)]
        logits[0][1] = logits[0][1, 0]  # all tie
        tokens = [torch.randint(vocab, (5,)) for _ in range(grid.dp)]

        def rank(rank_context: RankContext, tokens: list[Tensor] = tokens) -> Tensor:
            return ranks(rank_context.columns, tokens[rank_context.group])

        for rank_index, actual in enumerate(run_on_grid(grid, logits, head_of(grid, vocab, dtype).rank_calls(), rank)):
            group = rank_index // grid.tp
            rows = zip(logits[group].tolist(), tokens[group].tolist(), strict=True)
            assert actual.tolist() == [sum(x >= row[token] for x in row) for row, token in rows]
            assert group or actual[1] == vocab


@pytest.mark.parametrize("vocab", [300, 30_000])
@pytest.mark.parametrize("grid", [Grid(2, 1, False), Grid(4, 1, False), Grid(1, 2, True), Grid(2, 2, True)], ids=str)
def test_numbers_sent_per_row_do_not_grow_with_the_vocabulary(grid: Grid, vocab: int) -> None:
    """The test counts the 64-bit numbers that a shard sends per row that it scores."""
    rows, topk = 6, 4
    head = head_of(grid, vocab, torch.float32)
    batch = sampling(rows, torch.float32, ALL_MODES, random.Random(3))
    keys = noise_keys(batch.seeds, torch.full((rows, 1), 9))
    logits = [torch.randn(rows, vocab) for _ in range(grid.dp)]

    def numbers_sent(mode: SamplingMode, numbers_per_row: int) -> float:
        calls = head.sampling_calls(mode, numbers_per_row)

        def rank(rank_context: RankContext) -> int:
            sampling_batch = replace(
                batch, any_random=SamplingMode.RANDOM in mode, any_filtered=SamplingMode.FILTERED in mode
            )
            hashes = vocabulary_hashes(head.columns, CPU, rank_context.columns.start)
            draw = SamplingInputs(1, sampling_batch, Noise(keys, hashes, torch.float32) if mode else None)
            if numbers_per_row == NUMBERS_PER_CHOICE:
                choose(rank_context.columns, [draw])
            else:
                top_logprobs(rank_context.columns, draw, topk)
            return rank_context.axis.sent_bytes

        return max(run_on_grid(grid, logits, calls, rank)) / 8 / rows / (grid.dp if grid.wide else 1)

    spread = 6 / grid.shards if grid.wide else 0
    assert numbers_sent(SamplingMode(0), NUMBERS_PER_CHOICE) == 2
    assert numbers_sent(SamplingMode(0), numbers_sent_per_row(topk, head.columns)) == 9
    assert numbers_sent(SamplingMode.RANDOM, NUMBERS_PER_CHOICE) == 2 + spread
    assert numbers_sent(ALL_MODES, NUMBERS_PER_CHOICE) == 2 + spread + 2 + 2 * 4 * 256, "two searches of four digits"
    assert sum(width for _, width in head.logprob_calls(TOP_LOGPROBS)) <= 44


def test_sampling_checksum_covers_parameters_and_noise_keys() -> None:
    """The checksum depends on every number of every real request and on the order of the requests."""
    batch = sampling(3, torch.float64, ALL_MODES, random.Random(2))
    keys = noise_keys(batch.seeds, torch.arange(2).expand(3, -1))
    draw = SamplingInputs(2, batch, Noise(keys, token_hashes(torch.arange(4)), torch.float64))
    all_real, one_idle = torch.tensor([True] * 3), torch.tensor([True, False, True])
    expected_checksum = int(checksum([draw], [all_real]))
    for name in ("inverse_temperature", "noise_scale", "top_k", "top_p", "min_p"):
        changed = getattr(batch, name).clone()
        changed[1] += 1
        changed_inputs = replace(draw, sampling=replace(batch, **{name: changed}))
        assert int(checksum([changed_inputs], [all_real])) != expected_checksum, name
        assert int(checksum([changed_inputs], [one_idle])) == int(checksum([draw], [one_idle])), name
    flipped_noise = Noise(keys.flip(0), token_hashes(torch.arange(4)), torch.float64)
    assert int(checksum([replace(draw, noise=flipped_noise)], [all_real])) != expected_checksum
    assert int(checksum([draw], [all_real])) == expected_checksum != int(checksum([draw], [one_idle]))
    empty_inputs = SamplingInputs(2, batch.narrow(0, 0), Noise(keys[:0], token_hashes(torch.arange(4)), torch.float64))
    assert (
        int(checksum([empty_inputs], [all_real[:0]])) == 0
        and int(checksum([draw, empty_inputs], [all_real, all_real[:0]])) == expected_checksum
    )


def test_filtered_penalty_exceeds_the_range_of_the_noise() -> None:
    """Filters lower the scores of filtered tokens by more than any two noise values can differ."""
    ends = torch.tensor([0, 0x7FFFFFFF], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        low, high = sorted(gumbel_of(ends, dtype).tolist())
        assert high - low < FILTERED_PENALTY / 2
