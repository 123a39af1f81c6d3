"""Packs a `StepInput` into 64-bit integers, in which form a leader broadcasts it to the followers of its group.

A step input holds only the changes of the page and sampling tables, so a step costs a few hundred integers.
"""

import zlib
from array import array
from collections.abc import Iterator

import torch

from cluster.batch import (
    DecodeRequest,
    PageCopy,
    PageWrite,
    PromptChunk,
    RowGrammar,
    RowPenalties,
    RowSampling,
    SamplingMode,
    StepInput,
)
from cluster.device.staging import bits_of, float_of
from cluster.distributed.mesh import Axis

WORD = 8  # bytes of text per integer


def pack(order: StepInput) -> list[int]:
    """Return `order` as 64-bit integers: each list follows its length, and a float is given by its bits."""
    words = [int(order.mode), len(order.decodes)]
    for decode in order.decodes:
        words += decode
    words.append(len(order.lens))
    for pair in order.lens:
        words += pair
    words.append(len(order.chunks))
    for chunk in order.chunks:
        words += (chunk.row, chunk.start, chunk.stop, int(chunk.final), chunk.scored, *chunk.tokens)
    words.append(len(order.samplings))
    for s in order.samplings:
        words += (s.row, bits_of(s.temperature), s.top_k, bits_of(s.top_p), bits_of(s.min_p), s.seed)
    words.append(len(order.adjustings))
    for each in order.adjustings:
        words += _adjusting_words(each)
    words.append(len(order.constraints))
    for constraint in order.constraints:
        words += _constraint_words(constraint)
    words.append(len(order.writes))
    for write in order.writes:
        words += write
    words.append(len(order.copies))
    for copy in order.copies:
        words += copy
    return words


def unpack(words: list[int]) -> StepInput:
    """Return the step input that `pack` packed into `words`."""
    w = iter(words)  # arguments are evaluated from left to right, so they read the words in order
    return StepInput(
        mode=SamplingMode(next(w)),
        decodes=tuple(DecodeRequest(next(w), next(w), next(w)) for _ in range(next(w))),
        lens=tuple((next(w), next(w)) for _ in range(next(w))),
        chunks=tuple(_chunk(w) for _ in range(next(w))),
        samplings=tuple(
            RowSampling(next(w), float_of(next(w)), next(w), float_of(next(w)), float_of(next(w)), next(w))
            for _ in range(next(w))
        ),
        adjustings=tuple(_adjusting(w) for _ in range(next(w))),
        constraints=tuple(_constraint(w) for _ in range(next(w))),
        writes=tuple(PageWrite(next(w), next(w), next(w)) for _ in range(next(w))),
        copies=tuple(PageCopy(next(w), next(w), next(w)) for _ in range(next(w))),
    )


def checksum(order: StepInput) -> int:
    """Return a checksum of `order`: equal step inputs have equal checksums on every rank."""
    return zlib.crc32(array("q", pack(order)))


def shared(words: list[int], count: int, axis: Axis) -> list[int]:
    """Broadcast the leader's `count` words, and return them on every rank of the group."""
    row = torch.tensor(words, dtype=torch.int64) if axis.rank == 0 else torch.empty(count, dtype=torch.int64)
    got: list[int] = axis.broadcast(row).tolist()
    return got


def _adjusting_words(each: RowPenalties) -> Iterator[int]:
    yield from (each.row, bits_of(each.presence), bits_of(each.frequency), bits_of(each.repetition))
    yield from (each.missing, each.prompt_len, int(each.allowed is not None))
    for tokens in (each.tokens, each.late, each.allowed or (), *each.bad_words):
        yield len(tokens)
        yield from tokens
    yield 0  # ends the list of bad words, as none of them is empty
    yield len(each.bias)
    for token, bias in each.bias:
        yield from (token, bits_of(bias))


def _adjusting(w: Iterator[int]) -> RowPenalties:
    def some() -> tuple[int, ...]:
        return tuple(next(w) for _ in range(next(w)))

    row, presence, frequency, repetition = next(w), *(float_of(next(w)) for _ in range(3))
    missing, prompt_len, restricted = next(w), next(w), bool(next(w))
    tokens, late, allowed, bad_words = some(), some(), some(), tuple(iter(some, ()))
    return RowPenalties(
        row=row,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        missing=missing,
        prompt_len=prompt_len,
        tokens=tokens,
        late=late,
        bias=tuple((next(w), float_of(next(w))) for _ in range(next(w))),
        allowed=allowed if restricted else None,
        bad_words=bad_words,
    )


def _constraint_words(constraint: RowGrammar) -> Iterator[int]:
    text = constraint.grammar.encode()
    yield from (constraint.row, len(text))
    yield from array("q", text + bytes(-len(text) % WORD))  # padded to whole integers
    yield len(constraint.tokens)
    yield from constraint.tokens


def _constraint(w: Iterator[int]) -> RowGrammar:
    row, length = next(w), next(w)
    text = array("q", (next(w) for _ in range(-(-length // WORD)))).tobytes()[:length].decode()
    return RowGrammar(row, text, tuple(next(w) for _ in range(next(w))))


def _chunk(w: Iterator[int]) -> PromptChunk:
    """Read one chunk. The number of tokens is not packed: a chunk has one per row, and one more unless it is final."""
    row, start, stop, final, scored = next(w), next(w), next(w), bool(next(w)), next(w)
    return PromptChunk(row, start, stop, final, tuple(next(w) for _ in range(stop - start + (not final))), scored)
