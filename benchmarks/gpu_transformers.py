"""Plain decoding by `transformers` on one GPU, as its users run it: a static KV cache and `torch.compile`.

`python -m benchmarks.gpu_transformers [BATCH ..]` prints one line of JSON per batch size: milliseconds of a step and
tokens per second, for the first layers of Llama-3.1-8B with random bfloat16 weights after prompts of 2,048 tokens.
The engine's figures at the same shape come from stage `roofline_llama` of `tests/gpu/all.sh`; take both from one run on
one GPU. A step is (seconds for `NEW` tokens - seconds for one token) / (`NEW` - 1), so that the prompt does not count.
"""

import json
import os
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

LAYERS = int(os.environ.get("LAYERS", 12))
CONTEXT, NEW, REPEATS = 2048, 129, 3


def model(device: str) -> LlamaForCausalLM:
    """Return the model with random weights, made on `device`."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


def seconds(llama: LlamaForCausalLM, cache: StaticCache, ids: torch.Tensor, new: int) -> float:
    """Return the seconds in which `new` tokens are generated for each row of `ids` `[batch, prompt]`."""
    cache.reset()
    torch.cuda.synchronize()
    began = time.perf_counter()
    llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        past_key_values=cache,
        pad_token_id=0,
    )
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main(batches: list[int]) -> None:
    """Measure each batch size."""
    llama = model("cuda")
    for batch in batches:
        ids = torch.randint(3, 128000, (batch, CONTEXT), device="cuda")
        cache = StaticCache(config=llama.config, max_cache_len=CONTEXT + NEW)  # one cache, so that it compiles once
        with torch.inference_mode():
            for _ in range(2):  # the second run still captures
                seconds(llama, cache, ids, NEW)
            steps = sorted(
                (seconds(llama, cache, ids, NEW) - seconds(llama, cache, ids, 1)) / (NEW - 1) for _ in range(REPEATS)
            )
        ms = 1e3 * steps[REPEATS // 2]
        row: dict[str, object] = {
            "engine": "transformers, static cache, torch.compile",
            "layers": LAYERS,
            "batch": batch,
        }
        row |= {"context": CONTEXT, "ms": round(ms, 3), "tokens_s": round(1e3 * batch / ms, 1)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]] or [1, 16])
