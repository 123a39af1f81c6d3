"""The carriers of speculation and the one source of their widths (upstream: SGLang #25013).

Legend: B requests, K topk, H the draft's recurrent width, A what the draft takes from the target at extend.
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
    """What a request carries from one step's extend to the next step's draft.

    `topk_logprobs` `[B, K]` are those of the proposals for the position after the bonus, `topk_index` `[B, K]` their
    target token ids, `hidden` `[B, H]` the draft's recurrent hidden, `bonus` `[B]` the last token chosen by the target.
    """

    topk_logprobs: Tensor
    topk_index: Tensor
    hidden: Tensor
    bonus: Tensor

    @staticmethod
    def hidden_size_for(draft: DraftSpec | None) -> int:
        """H, the draft's own recurrent width; 0 without a draft."""
        return 0 if draft is None else draft.hidden

    @staticmethod
    def dtype_for(compute: torch.dtype) -> torch.dtype:
        """The recurrent hidden is kept in the draft's compute dtype."""
        return compute

    @classmethod
    def create_idle_input(
        cls, draft: DraftSpec | None, topk: int, compute: torch.dtype, device: torch.device, requests: int = 0
    ) -> Self:
        """Zeroed carriers of `requests` requests with the real trailing widths; 0 requests is an idle rank.

        Proposals differ, as real ones do: whatever the target chooses, it accepts one of them at most.
        """
        dtype = cls.dtype_for(compute)
        return cls(
            topk_logprobs=torch.zeros(requests, topk, dtype=at_least_float32(dtype), device=device),
            topk_index=torch.arange(topk, device=device).repeat(requests, 1),
            hidden=torch.zeros(requests, cls.hidden_size_for(draft), dtype=dtype, device=device),
            bonus=torch.zeros(requests, dtype=torch.int64, device=device),
        )

    def take(self, rows: Tensor) -> "EagleDraftInput":
        """The carriers of `rows` `[B]`."""
        columns = (self.topk_logprobs, self.topk_index, self.hidden, self.bonus)
        return EagleDraftInput(*(column.index_select(0, rows) for column in columns))

    def put(self, rows: Tensor, other: "EagleDraftInput") -> None:
        """Overwrite the carriers of `rows` `[B]` with `other`'s."""
        self.topk_logprobs.index_copy_(0, rows, other.topk_logprobs)
        self.topk_index.index_copy_(0, rows, other.topk_index)
        self.hidden.index_copy_(0, rows, other.hidden)
        self.bonus.index_copy_(0, rows, other.bonus)


@dataclass(slots=True)
class EagleDraftExtendInput:
    """Rows of one extend: S + 1 per decoding request, then the prompt rows.

    `hidden` `[T, A]` is the target's (aux) hidden of each committed row, `token_ids` `[T]` the token after it,
    `positions` `[T]`; `select` `[B]` the rows whose output proposes the next tokens.
    """

    hidden: Tensor
    token_ids: Tensor
    positions: Tensor
    select: Tensor

    @staticmethod
    def hidden_size_for(draft: DraftSpec | None) -> int:
        """A: `num_aux * target_hidden` when the draft uses aux hidden states, else the target's width."""
        return 0 if draft is None else draft.fc_in

    @staticmethod
    def dtype_for(compute: torch.dtype) -> torch.dtype:
        """Aux hidden states come in the target's compute dtype."""
        return compute

    @classmethod
    def hidden_of(cls, draft: DraftSpec | None, features: Sequence[Tensor], source: Tensor) -> Tensor:
        """Rows `source` `[T]` of all `features`, side by side, in a buffer `[T, A]`.

        Raises:
            ValueError: the features are not A wide together.
        """
        width, given = cls.hidden_size_for(draft), sum(feature.shape[1] for feature in features)
        if given != width:
            raise ValueError(f"the target's hidden states are {given} wide together, and the draft takes {width}")
        hidden = features[0].new_empty(source.shape[0], width, dtype=cls.dtype_for(features[0].dtype))
        return torch.cat([feature.index_select(0, source) for feature in features], 1, out=hidden)
