"""What is chosen from logits: the target's token after every node, a draft's proposals, log-probabilities to report.

Rows are taken in blocks of a bounded number of logits: besides the logits themselves, nothing has the size of all rows
times the vocabulary. Legend: R requests, n rows of each, V token ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.forward.blocks import blocks
from cluster.forward.filters import filter_
from cluster.forward.noise import Noise, at_least_float32

TOP_LOGPROBS = 20


def scored(logits: Tensor, sampling: SamplingBatch, noise: Noise, which: Tensor | None = None) -> Tensor:
    """What the chosen token maximises, `[R, n, V]` like `logits`: filtered, tempered logits plus noise.

    Row i of a request has the noise at its position `which[:, i]`. `which` is None where all rows share one position,
    or row i has the i-th.
    """
    made = noise.values(which)
    tempered = logits.to(made.dtype) * sampling.inverse_temperature[:, None, None]
    if sampling.filtered:
        filter_(tempered, sampling)
    return tempered.addcmul_(made, sampling.noise_scale[:, None, None])


def best(ranked: Tensor) -> tuple[Tensor, Tensor]:
    """The token of the highest score in `[.., V]`, and that score, `[..]` each.

    NaN and +inf are the highest, so the score is not finite if any logit was one of them: one number stands for all.
    """
    score, chosen = ranked.max(-1)
    return chosen, score


def choose(
    logits: Tensor, sampling: SamplingBatch, noise: Noise | None, which: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The target's token after every row and its score, `[R, n]` each, from logits `[R, n, V]`.

    `which` `[R, n]` as in `scored`; `noise` is None when no request samples.
    """
    if noise is None or not logits.shape[0]:
        return best(logits)
    (r, n, vocab), m = logits.shape, noise.keys.shape[1]
    parts = []
    for block in blocks(r, (n + m) * vocab, logits.device):
        at = None if which is None else which[block]
        parts.append(best(scored(logits[block], *_of(block, sampling, noise), at)))
    return _joined(parts)


def likeliest(logits: Tensor, sampling: SamplingBatch, noise: Noise | None, count: int) -> tuple[Tensor, Tensor]:
    """The `count` tokens of the highest score after each row of logits `[R, n, V]`, and the log-probability that the
    scores give them: (log-probabilities, columns), `[R, n, count]` each. `noise` is that at one position.
    """
    r, n, vocab = logits.shape
    parts = []
    for block in blocks(r, n * vocab, logits.device):
        ranked = logits[block]
        if noise is not None:
            ranked = scored(ranked, *_of(block, sampling, noise))
        top = ranked.log_softmax(-1, dtype=at_least_float32(ranked.dtype)).topk(count, -1)
        parts.append((top.values, top.indices))
    return _joined(parts)


def _of(block: slice, sampling: SamplingBatch, noise: Noise) -> tuple[SamplingBatch, Noise]:
    """Both for the requests of a block, which often is all of them."""
    if block.stop - block.start == noise.keys.shape[0]:
        return sampling, noise
    return sampling.narrow(block.start, block.stop), noise.narrow(block)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The blocks of both, put together."""
    if len(parts) == 1:
        return parts[0]
    one, other = zip(*parts, strict=True)
    return torch.cat(one), torch.cat(other)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities after T rows: `chosen` `[T]` of a given token, `values` of the likeliest `ids`, `[T, 20]`."""

    chosen: Tensor
    values: Tensor
    ids: Tensor


def logprobs(logits: Tensor, rows: Tensor, tokens: Tensor) -> Logprobs:
    """Those of the unfiltered, untempered model: of `tokens` `[T]` after `rows` `[T]` of logits `[.., V]`."""
    vocab = logits.shape[1]
    parts = []
    for block in blocks(rows.shape[0], vocab, logits.device):
        wide = logits.index_select(0, rows[block]).to(at_least_float32(logits.dtype))
        total = wide.logsumexp(-1, keepdim=True)
        top = wide.topk(min(TOP_LOGPROBS, vocab), -1)
        own = wide.gather(1, tokens[block, None]) - total
        parts.append((own[:, 0], top.values - total, top.indices))
    return Logprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))
