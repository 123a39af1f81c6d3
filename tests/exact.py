"""`transformers` as an oracle in true float64.

Its models keep norms, rope angles, softmax and routing in float32 whatever their dtype; inside `exact` that float32 is
float64, so that what is left between two implementations is rounding at 1e-15.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

FLOAT32 = torch.float32


@contextmanager
def exact() -> Iterator[None]:
    """Whatever asks for float32 in here gets float64."""
    default = torch.get_default_dtype()
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


class Oracle:
    """A `transformers` model and what passes through it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()

    def forward(self, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Logits `[T, V]`, and the residual stream entering each layer and leaving the last one, `[T, H]` each."""
        stream: list[Tensor] = []
        layers = self.model.get_decoder().layers
        hooks = [layer.register_forward_pre_hook(lambda _, given: stream.append(given[0][0])) for layer in layers]
        hooks.append(layers[-1].register_forward_hook(lambda _, given, out: stream.append(first(out)[0])))
        with exact(), torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        assert logits.dtype == torch.float64 == stream[-1].dtype
        return logits, stream

    def greedy(self, prompt: list[int], new: int) -> list[int]:
        """The likeliest `new` tokens after `prompt`, one after the other, whatever ends a text."""
        text, past = list(prompt), DynamicCache(config=self.model.config.get_text_config())
        with exact(), torch.inference_mode():
            while len(text) < len(prompt) + new:
                fresh = torch.tensor([text[past.get_seq_length() :]])
                logits = self.model(input_ids=fresh, past_key_values=past, use_cache=True).logits
                text.append(int(logits[0, -1].argmax()))
        return text[len(prompt) :]


def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out
