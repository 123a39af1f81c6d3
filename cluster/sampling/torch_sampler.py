"""The best tokens of rows of logits that a rank holds: what a chooser does, and the one in plain torch.

Rows are taken in blocks of a bounded number of logits: besides the logits themselves, nothing has the size of all rows
times the vocabulary. Legend: R requests, n rows of each, T rows, V token ids, v columns on this rank.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.sampling.filters import AT_ONCE, least_kept
from cluster.sampling.noise import Noise, at_least_float32, keys_along
from cluster.sampling.row_blocks import blocks
from cluster.sampling.sampling_inputs import SamplingInputs
from cluster.sampling.token_bitmask import barred

FAR = 64.0
"""How far a token that a filter rules out falls: below all that stay, whose noise differs by 26 at most, and below any
probability that matters to a draft. Among those ruled out the order by score remains."""


class Sampler(Protocol):
    """Takes the best of rows of logits `values` `[T, v]`, by scores in float32 at least.

    The rows draw as `draws` say, of T rows together, in order, or are ranked as they are where there are no draws.
    `least` `[T, 1]` are the least tempered logits that stay, where others have to tell. `masks` `[T, words]`, int32
    with a bit for each column, say what grammars allow: the same follows as from logits that are `barred` by them.
    Where there are masks, no request has filters.
    """

    def noise(self, seeds: Tensor, first: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """That of requests with `seeds` `[B]` at `count` positions from `first` `[B]` on, for the tokens
        with `hashes` `[v]`.
        """
        ...

    def best(
        self, values: Tensor, draws: Sequence[SamplingInputs], least: Tensor | None, masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The column of the highest score, and that score, `[T]` each.

        NaN and +inf are the highest, so the score is not finite if any logit was one of them: one number stands for
        all. The lowest column wins a tie.
        """
        ...

    def likeliest(
        self,
        values: Tensor,
        draws: Sequence[SamplingInputs],
        least: Tensor | None,
        count: int,
        masks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The log-probabilities that the scores give the `count` best, and their columns, `[T, count]` each. A row that
        is not finite has NaN, and the first columns.
        """
        ...

    def found(
        self, values: Tensor, draws: Sequence[SamplingInputs], least: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` best scores and their columns, `[T, count]` each, and the log of the sum over all columns,
        `[T, 1]`: of a shard's columns, which say nothing of log-probabilities. Without draws the lower column comes
        first in a tie, and the bits of a row do not depend on how many there are.
        """
        ...


class TorchSampler:
    """`Sampler` in torch's operators: the twin of the others."""

    def noise(self, seeds: Tensor, first: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """See `Sampler.noise`; kept where there is little of it."""
        keys = keys_along(seeds, first, count)
        return Noise.of(keys, hashes, dtype)

    def best(
        self, values: Tensor, draws: Sequence[SamplingInputs], least: Tensor | None, masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Sampler.best`."""
        values = values if masks is None else barred(values, masks, None)
        score, chosen = by_block(values, draws, least, lambda ranked: tuple(ranked.max(-1)))
        return chosen, score.to(at_least_float32(score.dtype))

    def likeliest(
        self,
        values: Tensor,
        draws: Sequence[SamplingInputs],
        least: Tensor | None,
        count: int,
        masks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Sampler.likeliest`."""
        values = values if masks is None else barred(values, masks, None)
        wide = at_least_float32(values.dtype)
        likely, chosen = by_block(
            values, draws, least, lambda ranked: tuple(ranked.log_softmax(-1, dtype=wide).topk(count, -1))
        )
        return likely, first_of_nan(likely, chosen)

    def found(
        self, values: Tensor, draws: Sequence[SamplingInputs], least: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Sampler.found`."""
        wide, taken = at_least_float32(values.dtype), best_and_total if draws else best_in_order
        top, columns, total = by_block(values, draws, least, lambda ranked: taken(ranked.to(wide), count))
        return top, columns, total


TORCH = TorchSampler()


def scored(
    logits: Tensor, sampling: SamplingBatch, noise: Noise, which: Tensor | None = None, least: Tensor | None = None
) -> Tensor:
    """What the chosen token maximises, `[R, n, v]` like `logits`: filtered, tempered logits plus noise.

    Row i of a request has the noise at its position `which[:, i]`. `which` is None where all rows share one position,
    or row i has the i-th. `least` `[R, n, 1]` are what filters keep of each row, where this is not the whole row.
    """
    made = noise.values(which)
    tempered = logits.to(made.dtype) * sampling.inverse_temperature[:, None, None]
    if sampling.filtered:
        tempered.add_(tempered < (least_kept(tempered, sampling) if least is None else least), alpha=-FAR)
    return tempered.addcmul_(made, sampling.noise_scale[:, None, None])


Taken = Callable[[Tensor], tuple[Tensor, ...]]
"""What is taken of the scores of some rows, `[.., v]`."""


def by_block(values: Tensor, draws: Sequence[SamplingInputs], least: Tensor | None, taken: Taken) -> tuple[Tensor, ...]:
    """What is `taken` of the scores of all rows of logits `[T, v]`, which draw as `draws` say. Scores live no longer
    than their block. Where nobody samples they are the logits.
    """
    width, device = values.shape[1], values.device
    if not draws or draws[0].noise is None:
        return joined([taken(values[block]) for block in blocks(values.shape[0], width, device)])
    parts, start = [], 0
    for draw in [each for each in draws if each.requests] or draws[:1]:
        assert draw.noise is not None, "all requests share a mode"
        r, n = draw.requests, draw.each
        logits = values[start : start + r * n].view(r, n, width)
        kept = None if least is None else least[start : start + r * n].view(r, n, 1)
        for block in blocks(r, (n + draw.noise.keys.shape[1]) * width, device):
            some, here = draw.of(block), None if kept is None else kept[block]
            assert some.noise is not None, "part of some noise"
            parts.append(taken(scored(logits[block], some.sampling, some.noise, some.which, here).view(-1, width)))
        start += r * n
    return joined(parts)


def best_and_total(wide: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of rows `[.., v]` and their columns, or all if there are fewer, and the log of the sum."""
    top = wide.topk(min(count, wide.shape[1]), -1)
    return top.values, top.indices, wide.logsumexp(-1, keepdim=True)


def best_in_order(wide: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same of rows `[T, v]`, the lower column first in a tie, and of each row the same bits whatever T is."""
    size, device = wide.shape[1], wide.device
    twice = wide if wide.shape[0] > 1 else torch.cat([wide, wide])  # torch adds up a single row in parts, by thread
    top, columns, total = best_and_total(twice, count)
    top, columns, total = (each[: wide.shape[0]] for each in (top, columns, total))
    at_cut, every = top == top[:, -1:], torch.arange(size, device=device)
    lowest = torch.where(wide == top[:, -1:], size - every, 0).topk(top.shape[1], -1).values  # of those that tie there
    place = (every[: top.shape[1]] - at_cut.logical_not().sum(1, keepdim=True)).clamp_(min=0)
    columns = torch.where(at_cut, size - lowest.gather(1, place), columns)
    columns, by_column = columns.sort(1)
    top, by_value = top.gather(1, by_column).sort(dim=1, descending=True, stable=True)
    return top, columns.gather(1, by_value), total


def joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The blocks of each, put together."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))


def first_of_nan(likely: Tensor, columns: Tensor) -> Tensor:
    """The first columns where all are NaN, between which a sort makes differences of its own."""
    return torch.where(likely == likely, columns, _first(likely.shape[-1], likely.device))


@cache
def _first(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def least_of(values: Tensor, draw: SamplingInputs) -> Tensor | None:
    """What filters keep of rows of logits `values` `[R n, v]`, `[R n, 1]`; None where no request has filters."""
    if not draw.sampling.filtered:
        return None
    parts, width = [], values.shape[1]
    logits = values.view(draw.requests, draw.each, width)
    for block in blocks(draw.requests, AT_ONCE * draw.each * width, values.device):
        sampling = draw.sampling.narrow(block.start, block.stop)
        tempered = logits[block].to(at_least_float32(values.dtype)) * sampling.inverse_temperature[:, None, None]
        parts.append(least_kept(tempered, sampling).view(-1, 1))
    return torch.cat(parts)
