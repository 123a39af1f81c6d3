"""The `Sampler` protocol (find the best tokens of rows of logits that a rank holds), and its torch implementation.

Rows are processed in blocks of a bounded number of logits, so that no temporary has the size of all rows times the
vocabulary. Legend: R requests, n rows of each, T rows, V token ids, v columns on this rank.
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
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.token_bitmask import barred

FAR = 64.0
"""Subtracted from the scores of tokens that a filter removes. Noise values differ by 26 at most, so these tokens end
below all kept ones, and their probability is too small to matter to a draft. Their order among themselves remains."""


class Sampler(Protocol):
    """Finds the best columns of rows of logits, by their scores."""

    def noise(self, seeds: Tensor, first: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """Return the noise of requests with `seeds` `[B]` at `count` positions from `first` `[B]` on, for the tokens
        with `hashes` `[v]`.
        """

    def best(self, rows: SamplerInput) -> tuple[Tensor, Tensor]:
        """Return the column of the highest score, and that score, `[T]` each.

        NaN and +inf count as highest, so the returned score tells whether any logit of the row was NaN or +inf. The
        lowest column wins a tie.
        """

    def likeliest(self, rows: SamplerInput, count: int) -> tuple[Tensor, Tensor]:
        """Return the log-softmax of the scores for the `count` best columns, and these columns, `[T, count]` each.

        For a row whose log-softmax is NaN, the columns are 0 to `count - 1`.
        """

    def found(self, rows: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `count` best scores and their columns, `[T, count]` each, and the log-sum-exp over the v columns,
        `[T, 1]`, without masks. The shards of a vocabulary merge these into log-probabilities.

        If `draws` is empty, the lower column comes first in a tie, and the bits of a row do not depend on the number of
        rows.
        """


class TorchSampler:
    """`Sampler` by torch operators: the reference implementation."""

    def noise(self, seeds: Tensor, first: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """Return the noise, with its values if there are few; see `Noise.of`."""
        keys = keys_along(seeds, first, count)
        return Noise.of(keys, hashes, dtype)

    def best(self, rows: SamplerInput) -> tuple[Tensor, Tensor]:
        """Take the maximum of the scores, block by block; see `Sampler.best`."""
        score, chosen = by_block(rows, lambda ranked: tuple(ranked.max(-1)))
        return chosen, score.to(at_least_float32(score.dtype))

    def likeliest(self, rows: SamplerInput, count: int) -> tuple[Tensor, Tensor]:
        """Take the log-softmax of the scores and its top `count`, block by block; see `Sampler.likeliest`."""
        wide = at_least_float32(rows.values.dtype)
        likely, chosen = by_block(rows, lambda ranked: tuple(ranked.log_softmax(-1, dtype=wide).topk(count, -1)))
        return likely, first_of_nan(likely, chosen)

    def found(self, rows: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Take the top `count` and the log-sum-exp of the scores, block by block; see `Sampler.found`."""
        wide, taken = at_least_float32(rows.values.dtype), best_and_total if rows.draws else best_in_order
        top, columns, total = by_block(rows, lambda ranked: taken(ranked.to(wide), count))
        return top, columns, total


TORCH = TorchSampler()


def scored(
    logits: Tensor, sampling: SamplingBatch, noise: Noise, which: Tensor | None = None, least: Tensor | None = None
) -> Tensor:
    """Return the scores `[R, n, v]`, which the chosen token maximises: filtered, tempered logits plus noise.

    `which` is as in `SamplingInputs`. `least` `[R, n, 1]` are the filters' thresholds. If `least` is None, they are
    computed here, which needs all columns of a row.
    """
    made = noise.values(which)
    # score = logit / temperature - FAR [if filtered out] + noise_scale * noise; greedy rows have scale 0.
    tempered = logits.to(made.dtype) * sampling.inverse_temperature[:, None, None]
    if sampling.filtered:
        tempered.add_(tempered < (least_kept(tempered, sampling) if least is None else least), alpha=-FAR)
    return tempered.addcmul_(made, sampling.noise_scale[:, None, None])


Taken = Callable[[Tensor], tuple[Tensor, ...]]
"""A reduction over the last dimension of the scores `[.., v]` of some rows."""


def by_block(rows: SamplerInput, taken: Taken) -> tuple[Tensor, ...]:
    """Return the reduction `taken` over the scores of all rows, computed block by block. If no request samples, the
    scores are the logits.
    """
    values, draws, least, masks = rows
    values = values if masks is None else barred(values, masks, None)
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
    """Return the `count` best of rows `[.., v]` (all, if v is less), their columns, and the log-sum-exp of each row."""
    top = wide.topk(min(count, wide.shape[1]), -1)
    return top.values, top.indices, wide.logsumexp(-1, keepdim=True)


def best_in_order(wide: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `best_and_total` for rows `[T, v]`, but ties are in order of columns, and a row's bits do not depend on T."""
    size, device = wide.shape[1], wide.device
    twice = wide if wide.shape[0] > 1 else torch.cat([wide, wide])  # torch sums a single row in another order
    top, columns, total = best_and_total(twice, count)
    top, columns, total = (each[: wide.shape[0]] for each in (top, columns, total))
    # If several columns have the value of the last one in `top`, it is undefined which of them `topk` took. Take the
    # lowest of them instead: the greatest `size - column`. The first of them comes after all columns of greater value.
    at_cut, every = top == top[:, -1:], torch.arange(size, device=device)
    lowest = torch.where(wide == top[:, -1:], size - every, 0).topk(top.shape[1], -1).values
    place = (every[: top.shape[1]] - at_cut.logical_not().sum(1, keepdim=True)).clamp_(min=0)
    columns = torch.where(at_cut, size - lowest.gather(1, place), columns)
    # Sort by column, then stably by value: ties stay in order of columns.
    columns, by_column = columns.sort(1)
    top, by_value = top.gather(1, by_column).sort(dim=1, descending=True, stable=True)
    return top, columns.gather(1, by_value), total


def joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Concatenate the blocks of each result."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))


def first_of_nan(likely: Tensor, columns: Tensor) -> Tensor:
    """Return `columns`, but 0, 1, 2, .. where `likely` is NaN, because the columns of NaN are undefined."""
    return torch.where(likely == likely, columns, _first(likely.shape[-1], likely.device))


@cache
def _first(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def least_of(values: Tensor, draw: SamplingInputs) -> Tensor | None:
    """Return the filters' thresholds `[R n, 1]` for logits `values` `[R n, v]`; None if no request has filters."""
    if not draw.sampling.filtered:
        return None
    parts, width = [], values.shape[1]
    logits = values.view(draw.requests, draw.each, width)
    for block in blocks(draw.requests, AT_ONCE * draw.each * width, values.device):
        sampling = draw.sampling.narrow(block.start, block.stop)
        tempered = logits[block].to(at_least_float32(values.dtype)) * sampling.inverse_temperature[:, None, None]
        parts.append(least_kept(tempered, sampling).view(-1, 1))
    return torch.cat(parts)
