"""What is chosen from logits: the target's token after every node, a draft's proposals, log-probabilities to report.

Rows are taken in blocks of a bounded number of logits, and noise is made for a block when its turn comes: nothing but
the logits themselves has the size of all rows times the vocabulary. Legend: R requests, n rows of each, V token ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.batch import SamplingBatch
from cluster.forward.blocks import blocks
from cluster.forward.filters import filter_
from cluster.forward.noise import at_least_float32, gumbel, vocabulary_hashes

TOP_LOGPROBS = 20


def scored(logits: Tensor, sampling: SamplingBatch, keys: Tensor, hashes: Tensor, which: Tensor | None) -> Tensor:
    """What the chosen token maximises, `[R, n, V]` like `logits`: filtered, tempered logits plus noise.

    `keys` `[R, m]` are `noise_keys`, `hashes` `[V]` those of the tokens; row i has key `which[:, i]` of its request.
    `which` is None where all rows share one key, or row i has the i-th.
    """
    noise = gumbel(keys, hashes, logits.dtype)
    if which is not None:
        (r, m), vocab = keys.shape, hashes.shape[0]
        rows = torch.arange(r, device=keys.device)[:, None] * m + which
        noise = noise.view(r * m, vocab).index_select(0, rows.view(-1)).view(logits.shape)
    tempered = logits.to(noise.dtype) * sampling.inverse_temperature[:, None, None]
    if sampling.filtered:
        filter_(tempered, sampling)
    return tempered.addcmul_(noise, sampling.noise_scale[:, None, None])


def best(ranked: Tensor) -> tuple[Tensor, Tensor]:
    """The token of the highest score in `[.., V]`, and that score, `[..]` each.

    NaN and +inf win the argmax, so the score is not finite if any logit was one of them: one number stands for all.
    """
    chosen = ranked.argmax(-1)
    return chosen, ranked.gather(-1, chosen[..., None])[..., 0]


def choose(
    logits: Tensor, sampling: SamplingBatch, keys: Tensor | None, which: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The target's token after every row and its score, `[R, n]` each, from logits `[R, n, V]`.

    `keys` `[R, m]` and `which` `[R, n]` as in `scored`; `keys` is None when no request samples.
    """
    if keys is None:
        return best(logits)
    (r, n, vocab), m = logits.shape, keys.shape[1]
    hashes = vocabulary_hashes(vocab, logits.device)
    parts = []
    for block in blocks(r, (n + m) * vocab):
        own = sampling.narrow(block.start, block.stop)
        parts.append(best(scored(logits[block], own, keys[block], hashes, None if which is None else which[block])))
    if len(parts) == 1:
        return parts[0]
    tokens, scores = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(scores)


def likeliest(
    logits: Tensor, sampling: SamplingBatch, keys: Tensor | None, hashes: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` tokens of the highest score after each row of logits `[R, n, V]`, and the log-probability that the
    scores give them: (log-probabilities, columns), `[R, n, count]` each. `keys` `[R, 1]` and `hashes` as in `scored`.
    """
    r, n, vocab = logits.shape
    wide = at_least_float32(logits.dtype)
    parts = []
    for block in blocks(r, n * vocab):
        ranked = logits[block].to(wide)
        if keys is not None:
            own = sampling.narrow(block.start, block.stop)
            ranked = scored(ranked, own, keys[block], hashes, None)
        top = ranked.topk(count, -1)
        parts.append((top.values - ranked.logsumexp(-1, keepdim=True), top.indices))
    if len(parts) == 1:
        return parts[0]
    values, columns = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(columns)


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
    for block in blocks(rows.shape[0], vocab):
        wide = logits.index_select(0, rows[block]).to(at_least_float32(logits.dtype))
        total = wide.logsumexp(-1, keepdim=True)
        top = wide.topk(min(TOP_LOGPROBS, vocab), -1)
        own = wide.gather(1, tokens[block, None]) - total
        parts.append((own[:, 0], top.values - total, top.indices))
    return Logprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))
