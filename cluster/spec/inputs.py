"""The tensors that speculation carries between phases. All other code takes their widths from here (upstream: SGLang
#25013).

Legend: B requests, K topk, S tree depth, H the width of the draft's recurrent hidden, A the total width of the target's
hidden states that the extend phase reads side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from cluster.arch import DraftSpec
from cluster.sampling.noise import at_least_float32


@dataclass(slots=True)
class EagleDraftInput:
    """What B requests carry from the extend phase of one step to the draft phase of the next ("carriers").

    `topk_index` `[B, K]` are the proposals for the position after the bonus, as target token ids; `topk_logprobs`
    `[B, K]` their log-probabilities; `hidden` `[B, H]` the draft's recurrent hidden; `bonus` `[B]` the bonus token.
    """

    topk_logprobs: Tensor
    topk_index: Tensor
    hidden: Tensor
    bonus: Tensor

    @staticmethod
    def hidden_size_for(draft: DraftSpec | None) -> int:
        """Return H, the width of the draft's recurrent hidden; 0 without a draft."""
        return 0 if draft is None else draft.hidden

    @staticmethod
    def dtype_for(compute: torch.dtype) -> torch.dtype:
        """Return the dtype of the recurrent hidden: the draft's compute dtype."""
        return compute

    @classmethod
    def create_idle_input(
        cls, draft: DraftSpec | None, topk: int, compute: torch.dtype, device: torch.device, requests: int = 0
    ) -> Self:
        """Return initial values for `requests` requests, with the same widths as the values of a real step.

        They are zeros, except that the K proposals of a request are different tokens, as real proposals are. So the
        target accepts at most one of the proposals.
        """
        dtype = cls.dtype_for(compute)
        return cls(
            topk_logprobs=torch.zeros(requests, topk, dtype=at_least_float32(dtype), device=device),
            topk_index=torch.arange(topk, device=device).repeat(requests, 1),
            hidden=torch.zeros(requests, cls.hidden_size_for(draft), dtype=dtype, device=device),
            bonus=torch.zeros(requests, dtype=torch.int64, device=device),
        )

    def take(self, rows: Tensor) -> "EagleDraftInput":
        """Return the entries `rows` `[B]` of every tensor: what the requests in these table rows carry."""
        columns = (self.topk_logprobs, self.topk_index, self.hidden, self.bonus)
        return EagleDraftInput(*(column.index_select(0, rows) for column in columns))

    def put(self, rows: Tensor, other: "EagleDraftInput") -> None:
        """Overwrite entries `rows` `[B]` of every tensor with the B entries of `other`. An entry belongs to the request
        in that table row.
        """
        self.topk_logprobs.index_copy_(0, rows, other.topk_logprobs)
        self.topk_index.index_copy_(0, rows, other.topk_index)
        self.hidden.index_copy_(0, rows, other.hidden)
        self.bonus.index_copy_(0, rows, other.bonus)


@dataclass(slots=True)
class EagleDraftExtendInput:
    """The T rows that the draft reads in one extend phase: those of decoding requests, then the prompt rows. A decoding
    request has S + 1 rows, or `MISSED_TOKENS` rows if the draft catches up on tokens that it has not read
    (`spec/resting.py`).

    For each row, `hidden` `[T, A]` is the target's (aux) hidden, `token_ids` `[T]` is the token after the row, and
    `positions` `[T]` is the row's position. `select` `[B]` is, for each request, the row whose output proposes the
    next tokens.
    """

    hidden: Tensor
    token_ids: Tensor
    positions: Tensor
    select: Tensor

    @staticmethod
    def hidden_size_for(draft: DraftSpec | None) -> int:
        """Return A, `num_aux * target_hidden` (`num_aux` is 1 if the draft reads no aux states); 0 without a draft."""
        return 0 if draft is None else draft.fc_in

    @staticmethod
    def dtype_for(compute: torch.dtype) -> torch.dtype:
        """Return the dtype of (aux) hidden states: the target's compute dtype."""
        return compute

    @classmethod
    def hidden_of(cls, draft: DraftSpec | None, target_hidden: Sequence[Tensor], source: Tensor) -> Tensor:
        """Take rows `source` `[T]` of each tensor of `target_hidden`, and return them side by side in a new tensor
        `[T, A]`.

        Raises:
            ValueError: the widths of these tensors do not sum to A.
        """
        width, total_width = cls.hidden_size_for(draft), sum(feature.shape[1] for feature in target_hidden)
        if total_width != width:
            raise ValueError(f"the target's hidden states are {total_width} wide together, and the draft takes {width}")
        hidden = target_hidden[0].new_empty(source.shape[0], width, dtype=cls.dtype_for(target_hidden[0].dtype))
        return torch.cat([feature.index_select(0, source) for feature in target_hidden], 1, out=hidden)
