"""The tokens of running requests on the device, and the search for what followed the last tokens of a request at an
earlier place in the same request.

Texts repeat themselves: an edited file, an answer that quotes, a loop in a listing. So the tokens after an earlier
occurrence of the last tokens are a good guess of the next tokens (prompt lookup, n-gram speculation).

Legend: R requests, S proposed tokens of each, L the positions that are kept.
"""

from collections.abc import Mapping
from ctypes import Structure, byref, c_int64, c_void_p
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cluster.batch import Batch, StepInput
from cluster.capture.recorder import native
from cluster.device.staging import Staging
from cluster.kernels.library import Library
from cluster.spec.verify import Accepted

MAX_POSITIONS = 1 << 16
"""At most this many positions of a request are kept. A longer request has no matches."""
LONGEST_MATCH, SHORTEST_MATCH = 16, 2
"""A match longer than `LONGEST_MATCH` counts as one of that length. A match shorter than `SHORTEST_MATCH` does not
count.
"""


class Continuations(NamedTuple):
    """The tokens that may come next, `tokens` `[R, count]`. `matched` `[R]` is how many of a request's last tokens were
    found earlier in its text, 0 if there is no match.
    """

    tokens: Tensor
    matched: Tensor


class Lookup(Protocol):
    """Appends to histories and looks up what followed. `history` `[rows, L]` int32 has the tokens of each table row."""

    def append(self, history: Tensor, rows: Tensor, starts: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Write the first `lens` `[R]` of `tokens` `[R, n]` to table rows `rows` `[R]`, from position `starts` `[R]`
        on. Positions from L on are dropped.
        """
        ...

    def continuations(self, history: Tensor, rows: Tensor, lasts: Tensor, count: int) -> Continuations:
        """Return `count` tokens that may follow the token at position `lasts` `[R]`.

        The tokens up to each earlier position are compared with the last tokens of the request, backwards, for at most
        `LONGEST_MATCH` tokens. The position with the longest match is taken; of several, the latest. The result is the
        tokens after this position; if they reach the end of the request before `count` tokens, they are repeated.
        Without a match of `SHORTEST_MATCH` tokens, the result is the last token, repeated, and `matched` is 0.
        """
        ...


class TorchLookup:
    """`Lookup` by torch operators: the reference implementation."""

    def append(self, history: Tensor, rows: Tensor, starts: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Write tokens; see `Lookup.append`."""
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        positions = starts[:, None] + offsets
        is_written = (offsets < lens[:, None]) & (positions < history.shape[1])
        # Where a token does not count, the old token is kept. So the host need not know how many tokens count.
        positions = positions.clamp(max=history.shape[1] - 1)
        old_tokens = history[rows[:, None], positions]
        # After clamping, several entries may name the last position. At most one of them is valid, and the others add
        # 0, so adding all changes leaves the valid token there.
        changes = torch.where(is_written, tokens.to(history.dtype) - old_tokens, 0)
        history.index_put_((rows[:, None], positions), changes, accumulate=True)

    def continuations(self, history: Tensor, rows: Tensor, lasts: Tensor, count: int) -> Continuations:
        """Look up tokens; see `Lookup.continuations`."""
        width, device = history.shape[1], history.device
        texts, lasts = history.index_select(0, rows), lasts.clamp(max=width - 1)
        positions = torch.arange(width, device=device)
        # `matching` `[R, L]`: how many tokens up to each position equal the last tokens of the request. `equal`
        # `[R, L]`: whether all tokens compared so far are equal.
        matching = torch.zeros_like(texts)
        equal = (positions < lasts[:, None]).to(texts.dtype)
        for length in range(LONGEST_MATCH):
            wanted = texts.gather(1, (lasts[:, None] - length).clamp(min=0))
            earlier = texts.roll(length, 1)
            equal = equal * ((earlier == wanted) & (positions >= length) & (lasts[:, None] >= length))
            matching += equal
        # The latest of the longest matches: lengths are compared first, then positions.
        best = (matching.long() * width + positions).masked_fill_(positions >= lasts[:, None], -1).max(1)
        is_match = best.values >= SHORTEST_MATCH * width
        found = torch.where(is_match, best.indices, lasts - 1)
        period = (lasts - found)[:, None]
        places = found[:, None] + 1 + torch.arange(count, device=device) % period
        tokens = texts.gather(1, torch.where(lasts[:, None] > 0, places, 0)).long()
        return Continuations(tokens, torch.where(is_match, best.values.div(width, rounding_mode="floor"), 0))


class _AppendStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("history", "rows", "starts", "lens", "tokens")),
        *((name, c_int64) for name in ("requests", "wide", "width")),
    )


class _ContinueStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("history", "rows", "lasts", "tokens", "matched")),
        *((name, c_int64) for name in ("requests", "wide", "width", "longest", "shortest")),
    )


class CLookup:
    """`Lookup` in C, for CPUs: one call instead of some eighty torch operators."""

    def __init__(self, library: Library) -> None:
        # The functions handle integers only: any dtype will do.
        self._append = library.functions["append", torch.float32]
        self._continue = library.functions["continue", torch.float32]

    def append(self, history: Tensor, rows: Tensor, starts: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Write tokens; see `Lookup.append`."""
        rows, starts, lens, tokens = rows.contiguous(), starts.contiguous(), lens.contiguous(), tokens.contiguous()
        struct = _AppendStruct(requests=tokens.shape[0], wide=tokens.shape[1], width=history.shape[1])
        struct.history, struct.rows, struct.starts = history.data_ptr(), rows.data_ptr(), starts.data_ptr()
        struct.lens, struct.tokens = lens.data_ptr(), tokens.data_ptr()
        native(self._append, byref(struct))

    def continuations(self, history: Tensor, rows: Tensor, lasts: Tensor, count: int) -> Continuations:
        """Look up tokens; see `Lookup.continuations`."""
        rows, lasts, tokens = rows.contiguous(), lasts.contiguous(), rows.new_empty(rows.shape[0], count)
        matched = torch.empty_like(rows)
        struct = _ContinueStruct(requests=rows.shape[0], wide=count, width=history.shape[1])
        struct.longest, struct.shortest = LONGEST_MATCH, SHORTEST_MATCH
        struct.history, struct.rows = history.data_ptr(), rows.data_ptr()
        struct.lasts, struct.tokens, struct.matched = lasts.data_ptr(), tokens.data_ptr(), matched.data_ptr()
        native(self._continue, byref(struct))
        return Continuations(tokens, matched)


class TokenHistory:
    """The tokens of each table row, by position, the bonus token included. The last row belongs to idle requests, which
    pad a batch.
    """

    def __init__(self, rows: int, positions: int, lookup: Lookup, device: torch.device) -> None:
        """Keep at most `positions` positions of `rows` table rows."""
        self._lookup, width = lookup, min(positions, MAX_POSITIONS)
        self.tokens, self._is_cut = torch.zeros(rows, width, dtype=torch.int32, device=device), positions > width

    def stage(self, step_input: StepInput, staging: Staging) -> None:
        """Add the tokens of admitted requests to the next copy to the device."""
        for i, history in enumerate(step_input.histories):
            staging.add(f"history {i}", history.tokens[: self.tokens.shape[1]])

    def put(self, step_input: StepInput, staged: Mapping[str, Tensor]) -> None:
        """Write to the table the tokens that `stage` sent to the device."""
        for i, history in enumerate(step_input.histories):
            tokens = staged[f"history {i}"]
            self.tokens[history.row, : tokens.shape[0]] = tokens

    def append(self, rows: Tensor, starts: Tensor, tokens: Tensor, lens: Tensor) -> None:
        """Write the first `lens` `[R]` of `tokens` `[R, n]`, from position `starts` `[R]` on."""
        self._lookup.append(self.tokens, rows, starts, tokens, lens)

    def append_accepted(self, batch: Batch, accepted: Accepted) -> None:
        """Append the tokens that a step has committed, and the first tokens after finished prompts."""
        # The accepted tokens follow the old bonus, which is at position seq_len. The last of them is the new bonus.
        r = batch.decodes
        self.append(batch.decode_rows, batch.seq_lens + 1, accepted.tokens, accepted.accept_len)
        if batch.prompt.final_rows.shape[0]:
            lens = torch.ones_like(batch.prompt.final_lens)
            self.append(batch.rows[r:], batch.prompt.final_lens, accepted.bonus[r:, None], lens)

    def continuations(self, rows: Tensor, lasts: Tensor, count: int) -> Continuations:
        """Return `count` tokens that may follow the token at position `lasts` `[R]`; see `Lookup.continuations`. A
        request whose last token is not kept has no match.
        """
        found = self._lookup.continuations(self.tokens, rows, lasts, count)
        if self._is_cut:
            found.matched.masked_fill_(lasts >= self.tokens.shape[1], 0)
        return found
