"""Shards of a vocabulary choose what one rank with all of it chooses: the same tokens, from the same thresholds."""

import random
from dataclasses import replace

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
from tests.unit.kernels.library import c_library
from tests.unit.sampling.samplings import sampling_of, whole
from tests.unit.sampling.shards import CPU, Grid, Group, Seat, head_of, sampling, seated

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
ALL = SamplingMode.RANDOM | SamplingMode.FILTERED


@pytest.fixture(params=["torch", "c"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """Each of those that shards choose with."""
    return TORCH if request.param == "torch" else CSampler(c_library())


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def groups_of(grid: Grid, dtype: torch.dtype, mode: SamplingMode, trial: int) -> list[Group]:
    torch.manual_seed(trial)
    dice = random.Random(trial)
    vocab, nodes = dice.choice((2, 5, 7, 29, 64, 257)), dice.randrange(1, 5)
    return [Group.random(vocab, nodes, dtype, mode, dice) for _ in range(grid.dp)]


@pytest.mark.parametrize("mode", [SamplingMode(0), SamplingMode.RANDOM, ALL], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_sharded_sampling_equals_single_rank_sampling(
    grid: Grid, dtype: torch.dtype, mode: SamplingMode, sampler: Sampler
) -> None:
    """Any number of rows, uneven vocabularies, ties, numbers that are not finite; no difference in any bit."""
    for trial in range(3):
        groups = groups_of(grid, dtype, mode, trial)
        vocab = groups[0].logits.shape[1]

        def rank(seat: Seat, groups: list[Group] = groups) -> tuple[Tensor, Tensor]:
            return choose(seat.columns, groups[seat.group].of_shard(seat.columns), sampler)

        answers = seated(
            grid, [g.logits for g in groups], head_of(grid, vocab, dtype).sampling_calls(mode, NUMBERS_PER_CHOICE), rank
        )
        for number, (tokens, scores) in enumerate(answers):
            group = groups[number // grid.tp]
            true_tokens, true_scores = choose(whole(group.logits), group.draws, sampler)
            assert torch.equal(tokens, true_tokens) and same(scores, true_scores), trial


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_sharded_filter_thresholds_equal_unsharded_thresholds(grid: Grid, dtype: torch.dtype) -> None:
    """But of rows with NaN or +inf, whose choice is that one whatever else stays."""
    for trial in range(4):
        groups = groups_of(grid, dtype, ALL, 100 + trial)
        head = head_of(grid, groups[0].logits.shape[1], dtype)

        def rank(seat: Seat, groups: list[Group] = groups) -> Tensor:
            least = sampler_input_of(seat.columns, groups[seat.group].of_shard(seat.columns)).thresholds
            assert least is not None
            return least

        calls = [call for call in head.sampling_calls(ALL, NUMBERS_PER_CHOICE) if call[0] != "compare"]
        for number, least in enumerate(seated(grid, [g.logits for g in groups], calls, rank)):
            scored = groups if grid.wide else [groups[number // grid.tp]]
            sane = torch.cat([group.logits for group in scored]).amax(1).isfinite()
            assert same(least[sane], torch.cat([group.thresholds() for group in scored])[sane]), trial


def in_order(likely: Tensor, count: int) -> Tensor:
    """The columns of the `count` highest of each row, the lower column first where two are the same."""
    return likely.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("mode", [SamplingMode(0), SamplingMode.RANDOM, ALL], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_sharded_draft_proposals_equal_single_rank_proposals(
    grid: Grid, mode: SamplingMode, mapped: bool, sampler: Sampler
) -> None:
    """With a reduced vocabulary, whose tokens are those of other shards of the target, and with fewer columns than are
    proposed."""
    dtype = torch.float64
    for trial in range(3):
        torch.manual_seed(trial)
        dice = random.Random(trial)
        vocab, topk, each = dice.choice((4, 7, 29, 90)), dice.choice((1, 2, 4)), dice.randrange(1, 4)
        ids = torch.arange(vocab) * 3 + trial % 3 if mapped else torch.arange(vocab)
        ranking, groups, logits = CoupledRanking(ids, topk, None, sampler), [], []
        for _ in range(grid.dp):
            both = sampling(dice.randrange(4), dtype, mode, dice)
            keys = noise_keys(both.seeds, torch.full((both.seeds.shape[0], 1), 9))
            noise = Noise.of(keys, vocabulary_hashes(3 * vocab, CPU), dtype) if SamplingMode.RANDOM in mode else None
            groups.append(SamplingInputs(each, both, noise))
            logits.append(torch.randn(both.seeds.shape[0] * each, vocab, dtype=dtype) * 3)

        def rank(
            seat: Seat, groups: list[SamplingInputs] = groups, ids: Tensor = ids, topk: int = topk
        ) -> tuple[Tensor, Tensor]:
            draw, (start, count) = groups[seat.group], (seat.columns.start, seat.columns.values.shape[1])
            own = ids[start : start + count]
            own = torch.cat([own, own.new_zeros(count - own.shape[0])])
            if draw.noise is not None and seat.columns.shards is not None:
                draw = replace(draw, noise=Noise(draw.noise.keys, vocabulary_hashes(count, CPU, start), dtype))
            return CoupledRanking(ids, topk, own, sampler).propose(seat.columns, draw)

        head = head_of(grid, vocab, dtype)
        answers = seated(grid, logits, head.sampling_calls(mode, numbers_sent_per_row(topk, head.columns)), rank)
        for number, (likely, tokens) in enumerate(answers):
            group = number // grid.tp
            true_likely, true_tokens = ranking.propose(whole(logits[group]), groups[group])
            assert torch.equal(tokens, true_tokens), trial
            assert likely.dtype == true_likely.dtype and torch.allclose(likely, true_likely, rtol=1e-12)


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
def test_sharded_proposals_order_ties_and_non_finite_values_like_one_rank(grid: Grid, sampler: Sampler) -> None:
    """The lower column first, and the first columns of a row that is not finite, as one rank has them too."""
    torch.manual_seed(1)
    vocab, topk = 11, 4
    logits = [torch.randn(6, vocab, dtype=torch.float64).round() for _ in range(grid.dp)]
    for rows in logits:
        rows[3, 7], rows[4, 7], rows[5, :] = float("inf"), float("nan"), float("-inf")
    draw, head = SamplingInputs(6, sampling_of(1), None), head_of(grid, vocab, torch.float64)
    calls = head.sampling_calls(SamplingMode(0), numbers_sent_per_row(topk, head.columns))
    for number, (likely, columns) in enumerate(
        seated(grid, logits, calls, lambda seat: top_logprobs(seat.columns, draw, topk, sampler))
    ):
        wanted = logits[number // grid.tp].log_softmax(-1)
        assert torch.equal(columns[:3], in_order(wanted[:3], topk))
        assert torch.allclose(likely[:3], wanted[:3].gather(1, columns[:3]))
        alone, first = top_logprobs(whole(logits[number // grid.tp]), draw, topk, sampler)
        assert likely[3:].isnan().all() and alone[3:].isnan().all()
        assert columns[3:].tolist() == first[3:].tolist() == [list(range(topk))] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_sharded_logprobs_equal_unsharded_logprobs(grid: Grid, dtype: torch.dtype) -> None:
    for trial, vocab in enumerate((3, 21, 50, 130)):
        torch.manual_seed(trial)
        logits = [torch.randn(5 + group, vocab, dtype=torch.float64).to(dtype) for group in range(grid.dp)]
        rows = [torch.randint(5 + group, (4,)) for group in range(grid.dp)]
        tokens = [torch.randint(vocab, (4,)) for _ in range(grid.dp)]
        calls = head_of(grid, vocab, dtype).logprob_calls(TOP_LOGPROBS)

        def rank(seat: Seat, rows: list[Tensor] = rows, tokens: list[Tensor] = tokens) -> Logprobs:
            return logprobs(seat.columns, rows[seat.group], tokens[seat.group])

        for number, got in enumerate(seated(grid, logits, calls, rank, each=4)):
            group = number // grid.tp
            wanted = logprobs(whole(logits[group]), rows[group], tokens[group])
            assert got.chosen.dtype == wanted.chosen.dtype and torch.allclose(got.chosen, wanted.chosen)
            assert torch.allclose(got.values, wanted.values)
            assert torch.equal(got.ids, wanted.ids), "ties of bfloat16 too"
            raw = logits[group][rows[group]].to(wanted.values.dtype).log_softmax(-1)
            assert torch.allclose(raw.gather(1, got.ids), got.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_sharded_token_ranks_equal_unsharded_token_ranks(grid: Grid, dtype: torch.dtype) -> None:
    """How many tokens are at least as likely as one: its place in the order, after those that tie with it."""
    for trial, vocab in enumerate((3, 21, 130)):
        torch.manual_seed(trial)
        logits = [torch.randn(5, vocab, dtype=torch.float64).to(dtype) for _ in range(grid.dp)]
        logits[0][1] = logits[0][1, 0]  # all tie
        tokens = [torch.randint(vocab, (5,)) for _ in range(grid.dp)]

        def rank(seat: Seat, tokens: list[Tensor] = tokens) -> Tensor:
            return ranks(seat.columns, tokens[seat.group])

        for number, got in enumerate(seated(grid, logits, head_of(grid, vocab, dtype).rank_calls(), rank)):
            group = number // grid.tp
            rows = zip(logits[group].tolist(), tokens[group].tolist(), strict=True)
            assert got.tolist() == [sum(x >= row[token] for x in row) for row, token in rows]
            assert group or got[1] == vocab


@pytest.mark.parametrize("vocab", [300, 30_000])
@pytest.mark.parametrize("grid", [Grid(2, 1, False), Grid(4, 1, False), Grid(1, 2, True), Grid(2, 2, True)], ids=str)
def test_numbers_sent_per_row_do_not_grow_with_the_vocabulary(grid: Grid, vocab: int) -> None:
    """Numbers of 64 bits that a shard sends, of each row that it scores."""
    rows, topk = 6, 4
    head = head_of(grid, vocab, torch.float32)
    both = sampling(rows, torch.float32, ALL, random.Random(3))
    keys = noise_keys(both.seeds, torch.full((rows, 1), 9))
    logits = [torch.randn(rows, vocab) for _ in range(grid.dp)]

    def sent(mode: SamplingMode, told_of_row: int) -> float:
        calls = head.sampling_calls(mode, told_of_row)

        def rank(seat: Seat) -> int:
            chosen = replace(both, any_random=SamplingMode.RANDOM in mode, any_filtered=SamplingMode.FILTERED in mode)
            hashes = vocabulary_hashes(head.columns, CPU, seat.columns.start)
            draw = SamplingInputs(1, chosen, Noise(keys, hashes, torch.float32) if mode else None)
            if told_of_row == NUMBERS_PER_CHOICE:
                choose(seat.columns, [draw])
            else:
                top_logprobs(seat.columns, draw, topk)
            return seat.axis.sent

        return max(seated(grid, logits, calls, rank)) / 8 / rows / (grid.dp if grid.wide else 1)

    spread = 6 / grid.shards if grid.wide else 0
    assert sent(SamplingMode(0), NUMBERS_PER_CHOICE) == 2
    assert sent(SamplingMode(0), numbers_sent_per_row(topk, head.columns)) == 9
    assert sent(SamplingMode.RANDOM, NUMBERS_PER_CHOICE) == 2 + spread
    assert sent(ALL, NUMBERS_PER_CHOICE) == 2 + spread + 2 + 2 * 4 * 256, "two searches of four digits"
    assert sum(width for _, width in head.logprob_calls(TOP_LOGPROBS)) <= 44


def test_sampling_checksum_covers_parameters_and_noise_keys() -> None:
    """Each number of each real request, and in which order the requests are."""
    both = sampling(3, torch.float64, ALL, random.Random(2))
    keys = noise_keys(both.seeds, torch.arange(2).expand(3, -1))
    draw = SamplingInputs(2, both, Noise(keys, token_hashes(torch.arange(4)), torch.float64))
    real, idle = torch.tensor([True] * 3), torch.tensor([True, False, True])
    told_by = int(checksum([draw], [real]))
    for name in ("inverse_temperature", "noise_scale", "top_k", "top_p", "min_p"):
        changed = getattr(both, name).clone()
        changed[1] += 1
        other = replace(draw, sampling=replace(both, **{name: changed}))
        assert int(checksum([other], [real])) != told_by, name
        assert int(checksum([other], [idle])) == int(checksum([draw], [idle])), name
    turned = Noise(keys.flip(0), token_hashes(torch.arange(4)), torch.float64)
    assert int(checksum([replace(draw, noise=turned)], [real])) != told_by
    assert int(checksum([draw], [real])) == told_by != int(checksum([draw], [idle]))
    nobody = SamplingInputs(2, both.narrow(0, 0), Noise(keys[:0], token_hashes(torch.arange(4)), torch.float64))
    assert int(checksum([nobody], [real[:0]])) == 0 and int(checksum([draw, nobody], [real, real[:0]])) == told_by


def test_filtered_penalty_exceeds_the_range_of_the_noise() -> None:
    """Whatever the noise: it differs by less than they fall."""
    ends = torch.tensor([0, 0x7FFFFFFF], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        low, high = sorted(gumbel_of(ends, dtype).tolist())
        assert high - low < FILTERED_PENALTY / 2
