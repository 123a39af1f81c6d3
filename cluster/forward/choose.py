"""What is chosen from logits: the target's token after every node, a draft's proposals, log-probabilities to report.

Rows are taken in blocks of a bounded number of logits: besides the logits themselves, nothing has the size of all rows
times the vocabulary. Where a rank holds a shard of the columns, `sharded` makes one choice of what the shards found.
Legend: R requests, n rows of each, T rows, V token ids, v columns on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.forward.blocks import blocks
from cluster.forward.draw import Draw
from cluster.forward.filters import least_kept
from cluster.forward.noise import Noise, at_least_float32
from cluster.forward.sharded import Found, best_of_all, told, top_of_all, whole
from cluster.models.vocab import Columns

TOP_LOGPROBS = 20
FAR = 64.0
"""How far a token that a filter rules out falls: below all that stay, whose noise differs by 26 at most, and below any
probability that matters to a draft. Among those ruled out the order by score remains."""


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


def best(ranked: Tensor) -> tuple[Tensor, Tensor]:
    """The token of the highest score in `[.., V]`, and that score, `[..]` each.

    NaN and +inf are the highest, so the score is not finite if any logit was one of them: one number stands for all.
    """
    score, chosen = ranked.max(-1)
    return chosen, score


Taken = Callable[[Tensor], tuple[Tensor, ...]]
"""What is taken of the scores of some rows, `[.., v]`."""


def by_block(values: Tensor, draws: Sequence[Draw], least: Tensor | None, taken: Taken) -> tuple[Tensor, ...]:
    """What is `taken` of the scores of all rows of logits `[T, v]`, which draw as `draws` say. Scores live no longer
    than their block. Where nobody samples they are the logits.
    """
    width, device = values.shape[1], values.device
    if draws[0].noise is None:
        return _joined([taken(values[block]) for block in blocks(values.shape[0], width, device)])
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
    return _joined(parts)


def adjusted(columns: Columns, draws: Sequence[Draw], ids: Tensor | None = None) -> Columns:
    """All columns of own rows, adjusted as `draws` say; the columns themselves where no request of the step has
    adjustments. `ids` `[V]` are the tokens of columns that are not the vocabulary in its order.
    """
    if draws[0].adjust is None:
        return columns
    columns, parts, start = whole(columns), [], 0
    for draw in draws:
        assert draw.adjust is not None, "all requests share a mode"
        stop = start + draw.requests * draw.each
        rows = columns.values[start:stop].view(draw.requests, draw.each, columns.values.shape[1])
        parts.append(draw.adjust.apply(rows, ids).flatten(0, 1))
        start = stop
    return replace(columns, values=parts[0] if len(parts) == 1 else torch.cat(parts))


def choose(columns: Columns, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """The target's token after every own row and its score, `[T]` each; `draws` are of T rows together, in order."""
    columns = adjusted(columns, draws)
    if draws[0].noise is None:
        chosen, score = best(columns.values)
    else:
        draws, least = told(columns, draws)
        chosen, score = by_block(columns.values, draws, least, best)
    return (chosen, score) if columns.shards is None else best_of_all(columns, columns.shards, chosen, score)


def likeliest(columns: Columns, draw: Draw, count: int) -> tuple[Tensor, Tensor]:
    """The `count` tokens of the highest score after each own row, and the log-probability that the scores give them:
    (log-probabilities, columns), `[T, count]` each. A row that is not finite has NaN, and the first columns. What is
    adjusted is adjusted before.
    """
    draws, least = told(columns, [draw])
    wide = at_least_float32(columns.values.dtype)
    if columns.shards is None:
        likely, chosen = by_block(
            columns.values, draws, least, lambda ranked: tuple(ranked.log_softmax(-1, dtype=wide).topk(count, -1))
        )
        return likely, _first_of_nan(likely, chosen)
    found = Found(*by_block(columns.values, draws, least, lambda ranked: _found(ranked.to(wide), count)))
    merged = top_of_all(columns, columns.shards, found, count)
    likely = (merged.values - merged.total.masked_fill(merged.total.isinf(), float("nan"))).to(wide)
    return likely, _first_of_nan(likely, merged.columns)


def _first_of_nan(likely: Tensor, columns: Tensor) -> Tensor:
    """The first columns where all are NaN, between which a sort makes differences of its own."""
    return torch.where(likely == likely, columns, _first(likely.shape[-1], likely.device))


@cache
def _first(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _found(wide: Tensor, count: int) -> tuple[Tensor, ...]:
    """What `Found` says of rows `[.., v]`."""
    top = wide.topk(min(count, wide.shape[1]), -1)
    return top.values, top.indices, wide.logsumexp(-1, keepdim=True)


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The blocks of each, put together."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(each) for each in zip(*parts, strict=True))


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities after T rows: `chosen` `[T]` of a given token, `values` of the likeliest `ids`, `[T, 20]`."""

    chosen: Tensor
    values: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """`logprobs` of q given tokens; `ranks` `[q]` count those that are at least as likely, the given one included."""

    logprobs: Logprobs
    ranks: Tensor


def logprobs(columns: Columns, rows: Tensor, tokens: Tensor) -> Logprobs:
    """Those of the unfiltered, untempered model: of `tokens` `[T]` after own `rows` `[T]`."""
    count, shards = min(TOP_LOGPROBS, columns.vocab), columns.shards
    asked = torch.stack([rows + columns.first, tokens])
    if shards is not None and shards.wide:
        asked = shards.spread(asked.t()).t()
    values, columns_, total, own = _joined(_asked(columns, asked, count))
    if shards is None:
        return Logprobs((own - total)[:, 0], values - total, columns_)
    merged = top_of_all(columns, shards, Found(values, columns_, total, own), count)
    made = merged.others.gather(0, (tokens // columns.values.shape[1])[None, :, None])[0]
    dtype = total.dtype
    return Logprobs((made - merged.total)[:, 0].to(dtype), (merged.values - merged.total).to(dtype), merged.columns)


def _asked(columns: Columns, asked: Tensor, count: int) -> list[tuple[Tensor, ...]]:
    """What `Found` says of rows, and the logit of a token in each; `asked` `[2, T']` are both. Where another shard has
    the token, any.
    """
    width, dtype = columns.values.shape[1], at_least_float32(columns.values.dtype)
    rows, local = asked[0], (asked[1] - columns.start).clamp_(0, width - 1)
    parts = []
    for block in blocks(rows.shape[0], width, columns.values.device):
        wide = columns.values.index_select(0, rows[block]).to(dtype)
        parts.append((*_found(wide, count), wide.gather(1, local[block, None])))
    return parts


def scores(columns: Columns, tokens: Tensor) -> Scores:
    """Those of `tokens` `[q]`, one after each own row, by the unfiltered, untempered model."""
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    return Scores(logprobs(columns, rows, tokens), ranks(columns, tokens))


def ranks(columns: Columns, tokens: Tensor) -> Tensor:
    """How many tokens are at least as likely as that of `tokens` `[q]` after each own row, `[q]`."""
    values, shards = columns.values, columns.shards
    if shards is None:
        return _at_least(values, values.gather(1, tokens[:, None]))[:, 0]
    asked = shards.spread(tokens[:, None]) if shards.wide else tokens[:, None]
    local, last = asked - columns.start, values.shape[1] - 1
    here = values.gather(1, local.clamp(0, last)).double()
    here.masked_fill_((local < 0) | (local > last), float("-inf"))
    found = shards.add(_at_least(values, shards.highest(here).to(values.dtype)))
    return found[columns.first : columns.first + tokens.shape[0], 0]


def _at_least(values: Tensor, least: Tensor) -> Tensor:
    """How many of each row of `values` `[T, v]` are at least `least` `[T, 1]`, `[T, 1]`."""
    cuts = blocks(values.shape[0], values.shape[1], values.device)
    return torch.cat([(values[cut] >= least[cut]).sum(1, keepdim=True) for cut in cuts])
