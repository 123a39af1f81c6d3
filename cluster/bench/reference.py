"""Greedy decoding by `generate` of `transformers`, with a KV cache, to compare the engine with. EOS is ignored, so
outputs have the same lengths as the engine's.
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from cluster.bench.runs import EngineRun, TokenLists


class Transformers:
    """The target model, run by `transformers`."""

    def __init__(self, folder: str, dtype: str, device: str = "cpu") -> None:
        """`dtype` and `device` are torch's names, such as float32 and cpu."""
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        compute = getattr(torch, dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=compute, local_files_only=True)
        self.model = model.to(device)
        self._device = device
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, prompts: TokenLists, new_tokens: int) -> EngineRun:
        """Continue the prompts as one batch, each by `new_tokens` tokens; all must have the same length."""
        generate_options = {"max_new_tokens": new_tokens, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        ids = torch.tensor([list(prompt) for prompt in prompts], device=self._device)
        started_at = time.perf_counter()
        sequences = self.model.generate(ids, attention_mask=torch.ones_like(ids), **generate_options)
        tokens = sequences[:, ids.shape[1] :].tolist()
        return EngineRun(tokens=tokens, seconds=time.perf_counter() - started_at)

    @torch.inference_mode()
    def log_probabilities(self, texts: TokenLists) -> list[torch.Tensor]:
        """Return, for each text of T tokens, log-probabilities `[T, V]`: row t is for the token after token t."""
        rows = (torch.tensor([list(text)], device=self._device) for text in texts)
        return [self.model(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1) for row in rows]
