"""`transformers` as a reference implementation in true float64.

Models of `transformers` compute norms, rope angles, softmax and routing in float32, whatever their dtype is. Inside
`exact`, this float32 is replaced by float64. Two correct implementations then differ only by rounding at 1e-15.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

FLOAT32 = torch.float32


@contextmanager
def exact() -> Iterator[None]:
    """Replace float32 by float64 in all torch code that runs inside the block."""
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
    """A `transformers` model that gives reference logits, hidden states and greedy tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()

    def forward(self, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the logits `[T, V]` and the residual stream: the input of each layer and the output of the last
        layer, `[T, H]` each.
        """
        stream: list[Tensor] = []
        layers = decoder_of(self.model).layers
        hooks = [layer.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0][0])) for layer in layers]
        hooks.append(layers[-1].register_forward_hook(lambda _, inputs, out: stream.append(first_output(out)[0])))
        with exact(), torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        assert logits.dtype == torch.float64 == stream[-1].dtype
        return logits, stream

    def greedy(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Return `max_new_tokens` greedily decoded tokens after `prompt`. A stop token does not end the decoding."""
        tokens, kv_cache = list(prompt), DynamicCache(config=self.model.config.get_text_config())
        with exact(), torch.inference_mode():
            while len(tokens) < len(prompt) + max_new_tokens:
                uncached_ids = torch.tensor([tokens[kv_cache.get_seq_length() :]])
                logits = self.model(input_ids=uncached_ids, past_key_values=kv_cache, use_cache=True).logits
                tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]


def decoder_of(model: Any) -> Any:
    """Return the module that has the decoder layers. Llama-4's classes return themselves as their decoder."""
    decoder = model.get_decoder()
    while not hasattr(decoder, "layers"):
        decoder = decoder.language_model if hasattr(decoder, "language_model") else decoder.model
    return decoder


def first_output(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out
