"""Plain decoding by `transformers` on one GPU, as its users run it: a static KV cache and `torch.compile`.

`python -m benchmarks.gpu_transformers [BATCH ..]` prints one line of JSON per batch size: milliseconds of a step and
tokens per second, for the first layers of Llama-3.1-8B with random bfloat16 weights after prompts of 2,048 tokens.
The engine's figures at the same shape come from stage `roofline_llama` of `tests/gpu/all.sh`; take both from one run on
one GPU. The time of a step is (seconds for `NEW_TOKENS` tokens - seconds for one token) / (`NEW_TOKENS` - 1), so that
the prompt does not count.
"""

import json
import os
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

LAYERS = int(os.environ.get("LAYERS", 12))
CONTEXT_TOKENS, NEW_TOKENS, REPEATS = 2048, 129, 3


def random_llama(device: str) -> LlamaForCausalLM:
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


def generate_seconds(llama: LlamaForCausalLM, cache: StaticCache, ids: torch.Tensor, new_tokens: int) -> float:
    """Return the seconds in which `new_tokens` tokens are generated for each row of `ids` `[batch, prompt]`."""
    cache.reset()
    torch.cuda.synchronize()
    started_at = time.perf_counter()
    llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        past_key_values=cache,
        pad_token_id=0,
    )
    torch.cuda.synchronize()
    return time.perf_counter() - started_at


def main(batches: list[int]) -> None:
    """Measure each batch size."""
    llama = random_llama("cuda")
    for batch in batches:
        ids = torch.randint(3, 128000, (batch, CONTEXT_TOKENS), device="cuda")
        # One cache for all runs, so that `torch.compile` compiles once.
        cache = StaticCache(config=llama.config, max_cache_len=CONTEXT_TOKENS + NEW_TOKENS)
        with torch.inference_mode():
            for _ in range(2):  # the second run still captures
                generate_seconds(llama, cache, ids, NEW_TOKENS)
            steps = sorted(
                (generate_seconds(llama, cache, ids, NEW_TOKENS) - generate_seconds(llama, cache, ids, 1))
                / (NEW_TOKENS - 1)
                for _ in range(REPEATS)
            )
        ms = 1e3 * steps[REPEATS // 2]
        result_row: dict[str, object] = {
            "engine": "transformers, static cache, torch.compile",
            "layers": LAYERS,
            "batch": batch,
        }
        result_row |= {"context": CONTEXT_TOKENS, "ms": round(ms, 3), "tokens_s": round(1e3 * batch / ms, 1)}
        print(json.dumps(result_row), flush=True)


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]] or [1, 16])
