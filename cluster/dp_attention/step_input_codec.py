"""Packs a `StepInput` into 64-bit integers. A leader (the first rank of an attention group, which schedules for the
group) broadcasts these to the other ranks of its group.

Of the page and sampling tables a step input holds only the changes. So a step that only decodes takes a few integers
per request. Prompt chunks add one integer per token.
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
    RowTokens,
    SamplingMode,
    StepInput,
    WindowPageWrite,
)
from cluster.device.staging import bits_of, float_of
from cluster.distributed.mesh import Axis

BYTES_PER_INTEGER = 8  # bytes of text per integer


def pack(step_input: StepInput) -> list[int]:
    """Return `step_input`, as it is before padding, as 64-bit integers. The length of a list comes before the list. The
    tokens of a chunk have no length, and an empty list ends the bad words. A float is packed as its bits.
    """
    integers = [int(step_input.mode), len(step_input.decodes)]
    for decode in step_input.decodes:
        integers += decode
    integers.append(len(step_input.lens))
    for pair in step_input.lens:
        integers += pair
    integers.append(len(step_input.chunks))
    for chunk in step_input.chunks:
        integers += (chunk.row, chunk.start, chunk.stop, int(chunk.final), chunk.scored, *chunk.tokens)
    integers.append(len(step_input.samplings))
    for sampling in step_input.samplings:
        integers += (
            sampling.row,
            bits_of(sampling.temperature),
            sampling.top_k,
            bits_of(sampling.top_p),
            bits_of(sampling.min_p),
            sampling.seed,
            sampling.max_draft_tokens,
        )
    integers.append(len(step_input.penalties))
    for penalties in step_input.penalties:
        integers += _pack_penalties(penalties)
    integers.append(len(step_input.constraints))
    for grammar in step_input.constraints:
        integers += _pack_grammar(grammar)
    integers.append(len(step_input.histories))
    for history in step_input.histories:
        integers += (history.row, len(history.tokens), *history.tokens)
    integers.append(len(step_input.writes))
    for write in step_input.writes:
        integers += write
    integers.append(len(step_input.window_writes))
    for window_write in step_input.window_writes:
        integers += window_write
    integers.append(len(step_input.copies))
    for copy in step_input.copies:
        integers += copy
    return integers


def unpack(integers: list[int]) -> StepInput:
    """Return the step input that `pack` packed into `integers`."""
    remaining = iter(integers)  # arguments are evaluated from left to right, so they read the integers in order
    return StepInput(
        mode=SamplingMode(next(remaining)),
        decodes=tuple(DecodeRequest(next(remaining), next(remaining), next(remaining)) for _ in range(next(remaining))),
        lens=tuple((next(remaining), next(remaining)) for _ in range(next(remaining))),
        chunks=tuple(_unpack_chunk(remaining) for _ in range(next(remaining))),
        samplings=tuple(
            RowSampling(
                next(remaining),
                float_of(next(remaining)),
                next(remaining),
                float_of(next(remaining)),
                float_of(next(remaining)),
                next(remaining),
                next(remaining),
            )
            for _ in range(next(remaining))
        ),
        penalties=tuple(_unpack_penalties(remaining) for _ in range(next(remaining))),
        constraints=tuple(_unpack_grammar(remaining) for _ in range(next(remaining))),
        histories=tuple(_unpack_tokens(remaining) for _ in range(next(remaining))),
        writes=tuple(PageWrite(next(remaining), next(remaining), next(remaining)) for _ in range(next(remaining))),
        window_writes=tuple(WindowPageWrite(next(remaining), next(remaining)) for _ in range(next(remaining))),
        copies=tuple(PageCopy(*(next(remaining) for _ in PageCopy._fields)) for _ in range(next(remaining))),
    )


def checksum(step_input: StepInput) -> int:
    """Return a checksum of what `pack` packs; it is the same on all ranks that have equal step inputs."""
    return zlib.crc32(array("q", pack(step_input)))


def broadcast_from_leader(integers: list[int], count: int, axis: Axis) -> list[int]:
    """Broadcast the integers of rank 0 of `axis`, `count` of them, to all ranks of `axis`, and return them there."""
    buffer = torch.tensor(integers, dtype=torch.int64) if axis.rank == 0 else torch.empty(count, dtype=torch.int64)
    received: list[int] = axis.broadcast(buffer).tolist()
    return received


def _pack_penalties(penalties: RowPenalties) -> Iterator[int]:
    yield from (penalties.row, bits_of(penalties.presence), bits_of(penalties.frequency), bits_of(penalties.repetition))
    yield from (penalties.min_tokens_left, penalties.prompt_len, int(penalties.allowed is not None))
    for tokens in (penalties.tokens, penalties.stop_tokens, penalties.allowed or (), *penalties.bad_words):
        yield len(tokens)
        yield from tokens
    yield 0  # an empty list ends the bad words, as no bad word is empty
    yield len(penalties.bias)
    for token, bias in penalties.bias:
        yield from (token, bits_of(bias))


def _unpack_penalties(integers: Iterator[int]) -> RowPenalties:
    def token_list() -> tuple[int, ...]:
        return tuple(next(integers) for _ in range(next(integers)))

    row, presence, frequency, repetition = next(integers), *(float_of(next(integers)) for _ in range(3))
    min_tokens_left, prompt_len, has_allowed = next(integers), next(integers), bool(next(integers))
    tokens, stop_tokens, allowed, bad_words = token_list(), token_list(), token_list(), tuple(iter(token_list, ()))
    return RowPenalties(
        row=row,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        min_tokens_left=min_tokens_left,
        prompt_len=prompt_len,
        tokens=tokens,
        stop_tokens=stop_tokens,
        bias=tuple((next(integers), float_of(next(integers))) for _ in range(next(integers))),
        allowed=allowed if has_allowed else None,
        bad_words=bad_words,
    )


def _pack_grammar(grammar: RowGrammar) -> Iterator[int]:
    text = grammar.grammar.encode()
    yield from (grammar.row, len(text))
    yield from array("q", text + bytes(-len(text) % BYTES_PER_INTEGER))  # padded to whole integers
    yield len(grammar.tokens)
    yield from grammar.tokens


def _unpack_grammar(integers: Iterator[int]) -> RowGrammar:
    row, length = next(integers), next(integers)
    text = array("q", (next(integers) for _ in range(-(-length // BYTES_PER_INTEGER)))).tobytes()[:length].decode()
    return RowGrammar(row, text, tuple(next(integers) for _ in range(next(integers))))


def _unpack_tokens(integers: Iterator[int]) -> RowTokens:
    row, count = next(integers), next(integers)
    return RowTokens(row, tuple(next(integers) for _ in range(count)))


def _unpack_chunk(integers: Iterator[int]) -> PromptChunk:
    """Read one chunk. The number of its tokens is not packed: one per row, and one more unless the chunk is final."""
    row, start, stop, final, scored = (
        next(integers),
        next(integers),
        next(integers),
        bool(next(integers)),
        next(integers),
    )
    return PromptChunk(
        row, start, stop, final, tuple(next(integers) for _ in range(stop - start + (not final))), scored
    )
