"""What `aerie inspect` says of the KV memory of a request is what the allocator gives it, for the shapes of published
models at 32k tokens.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cluster.arch import LayerGeometry
from cluster.arch.families.gemma3 import gemma3
from cluster.arch.families.gemma4 import gemma4
from cluster.arch.families.gpt_oss import gpt_oss
from cluster.arch.families.mimo import mimo_v2
from cluster.arch.keys import ConfigKeys
from cluster.arch.target import TargetArch
from cluster.arch.windows import window_layout
from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.kv.cache import KVCache
from cluster.kv.page_table import PageTable
from cluster.kv.pool_sizes import PoolSizes, WindowNeeds
from cluster.kv.window_map import WindowMap
from cluster.kv.window_pages import WindowPages
from cluster.tools.kv_memory import cell_bytes, kv_memory

CONTEXT, CHUNK, CPU = 32768, 2048, torch.device("cpu")
SIZES = {"vocab_size": 1000, "intermediate_size": 64, "max_position_embeddings": CONTEXT}
CONFIGS = {
    "gpt-oss-20b": (
        gpt_oss,
        {"hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8},
    ),
    "Gemma-3-4B": (
        gemma3,
        {
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 1024,
        },
    ),
    "Gemma-4-E2B": (
        gemma4,
        {
            "hidden_size": 1536,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "vocab_size_per_layer_input": 1000,
        },
    ),
    "MiMo-V2-Flash": (mimo_v2, {"hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64}),
}
MORE_REQUESTS = {"gpt-oss-20b": 15, "Gemma-3-4B": 44, "Gemma-4-E2B": 30, "MiMo-V2-Flash": 71}
"""By model: how many requests of `CONTEXT` tokens fit in the memory in which 8 requests fit if there are no window
pools.
"""
KV_HEADS = {"MiMo-V2-Flash": {"num_key_value_heads": 4, "sliding_window_size": 128}}


def layers_of(name: str) -> tuple[LayerGeometry, ...]:
    read, config = CONFIGS[name]
    read_target: Callable[[ConfigKeys], TargetArch] = read
    return read_target(ConfigKeys(SIZES | config | KV_HEADS.get(name, {}), "")).layers


def implied_bytes(layers: tuple[LayerGeometry, ...], windows: bool) -> int:
    """Return what the layers keep of a request of `CONTEXT` tokens, in bfloat16."""
    return sum(
        cell_bytes(layer, "bfloat16") * (min(CONTEXT, layer.sliding_window or CONTEXT) if windows else CONTEXT)
        for layer in layers
    )


def needs_of(layers: tuple[LayerGeometry, ...], requests: int) -> WindowNeeds:
    settings = ResolvedSettings.from_settings(EngineConfig.from_kwargs({"model_path": ""}))
    layout = window_layout(layers, settings, CONTEXT, 0, 0)
    assert layout is not None
    return WindowNeeds(layout.reach, layout.written, layout.request_pages, CHUNK // 16, requests)


def allocated_bytes(layers: tuple[LayerGeometry, ...], token_bytes: int, window_bytes: int) -> int:
    """Return what the pages of a request of `CONTEXT` tokens take after its prompt was read in chunks."""
    pages, window_map = CONTEXT // 16 + 8, WindowMap(CONTEXT // 16 + 8, 16, CPU)
    window = WindowPages(needs_of(layers, 1), pages, window_map)
    cache = KVCache(pages, PageTable(1, CONTEXT + 64, 16, CPU, window_map), radix=True, window=window)
    tokens = list(range(CONTEXT))
    lease = cache.open(tokens, CONTEXT)
    assert lease is not None
    for stop in range(CHUNK, CONTEXT + 1, CHUNK):
        cache.cover(lease, stop)
        cache.publish(lease, tokens, stop)
    cache.check()
    return 16 * (cache.used_pages * token_bytes + window.used * window_bytes)


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_of_a_long_request_is_what_inspect_says_and_the_layers_imply(name: str) -> None:
    layers = layers_of(name)
    told = kv_memory([layers], "bfloat16", CONTEXT, "cpu")
    request_bytes = told["kv_request_bytes"][str(CONTEXT)]
    allocated = allocated_bytes(layers, told["kv_bytes_per_token"], told["kv_window_bytes_per_token"])
    assert allocated == pytest.approx(request_bytes, rel=0.05)
    assert implied_bytes(layers, windows=True) == pytest.approx(request_bytes, rel=0.05)
    assert implied_bytes(layers, windows=False) > 1.9 * request_bytes
    pools = [line for line in told["kv_pools"] if ": none" not in line]
    assert len(pools) == 2 and "keeps only the last tokens" in "".join(pools)


def test_layers_that_borrow_are_named_with_the_layer_that_they_read() -> None:
    told = kv_memory([layers_of("Gemma-4-E2B")], "bfloat16", CONTEXT, "cpu")
    assert told["kv_pools"][2:] == [
        "target, layers 15-16, 18-22, 24-28, 30-33: none, because they read the keys and values of layer 14",
        "target, layers 17, 23, 29, 34: none, because they read the keys and values of layer 11",
    ]
    assert told["kv_bytes_per_token"] == 2 * 2 * 2 * 512, "layers 5 and 11, bfloat16, K and V of one head of 512"
    assert told["kv_window_bytes_per_token"] == 13 * 2 * 2 * 256


@pytest.mark.parametrize("name", CONFIGS)
def test_more_long_requests_fit_in_the_same_memory_with_window_pools(name: str) -> None:
    """In memory for 8 requests without window pools. Pools of a server whose requests are that long have the ratio of
    window pages that such requests need.
    """
    layers, needs = layers_of(name), needs_of(layers_of(name), 64)
    told, memory = kv_memory([layers], "bfloat16", CONTEXT, "cpu"), 8 * implied_bytes(layers, windows=False)
    ratio = (needs.request_pages + 8) * 16 / CONTEXT
    window = replace(needs, ratio=ratio)
    sizes = PoolSizes(16, told["kv_bytes_per_token"], told["kv_window_bytes_per_token"], window)
    tokens = sizes.tokens_in(memory)
    by_windows = (sizes.window_tokens(tokens) // 16 - needs.chunk_pages) // needs.request_pages
    assert min(tokens // CONTEXT, by_windows) >= MORE_REQUESTS[name]
