"""`transformers.generate` as a contender: greedy, KV cache on, EOS ignored, the same prompts and lengths."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from cluster.bench.runs import Run


class Transformers:
    """The target as `transformers` runs it, in the dtype of our engine."""

    def __init__(self, folder: str, dtype: str, device: str = "cpu") -> None:
        """`dtype` and `device` are torch's names, such as float32 and cpu."""
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        compute = getattr(torch, dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=compute, local_files_only=True)
        self.model = model.to(device)
        self._device = device
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int) -> Run:
        """Continue the prompts, which all have the same length, `batch` of them at a time."""
        how = {"max_new_tokens": new_tokens, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        whole = Run()
        for start in range(0, len(prompts), batch):
            ids = torch.tensor([list(p) for p in prompts[start : start + batch]], device=self._device)
            started = time.perf_counter()
            made = self.model.generate(ids, attention_mask=torch.ones_like(ids), **how)
            tokens = made[:, ids.shape[1] :].tolist()
            whole.add(Run(tokens=tokens, seconds=time.perf_counter() - started))
        return whole

    @torch.inference_mode()
    def log_probabilities(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Log-probabilities `[T, V]` after every token of each text."""
        rows = (torch.tensor([list(text)], device=self._device) for text in texts)
        return [self.model(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1) for row in rows]
