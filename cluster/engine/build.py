"""Putting one rank's engine together from its config: models, pools, tables, in the order that memory wants."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cluster.arch import DraftSpec, read_target
from cluster.attention.torch_backend import TorchAttention
from cluster.config import ConfigError, EngineConfig, TreeShape, tree_shape
from cluster.dp_attention.coordinator import Coordinator
from cluster.engine.assemble import Assembler
from cluster.engine.engine import Engine, Parts
from cluster.engine.scheduler import Scheduler
from cluster.forward.runner import DraftRunner, Stopwatch, TargetRunner
from cluster.forward.sampler import SamplingTable
from cluster.kv.budget import page_count
from cluster.kv.cache import KVCache
from cluster.kv.pool import KVPool, slot_bytes
from cluster.mesh import Mesh
from cluster.metrics import EngineMetrics
from cluster.models.eagle3 import Eagle3Draft
from cluster.models.layer import NoExchange
from cluster.models.registry import load_draft, load_target
from cluster.spec.draft import Draft, EagleDraft, NoDraft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.step import Step
from cluster.text import TextTokenizer

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


Drafting = Callable[[list[DraftRunner], TreeShape], Draft]
"""What drafts with the configured draft's runners."""


def build_engine(config: EngineConfig, draft: Draft | None = None, drafting: Drafting = EagleDraft) -> Engine:
    """The engine of `config`, ready to step. `draft` takes the place of the configured draft's drafting, for tests;
    `drafting` makes it of the configured draft, for those who want to watch.

    Raises:
        ConfigError: something cannot run as configured; the message names the setting and the remedy.
    """
    shape = tree_shape(config)
    if config.tp_size > 1:
        raise ConfigError(f"tp_size {config.tp_size} is not served yet; set tp_size to 1")
    device = _device(config)
    arch = read_target(config.model_path)
    dtype = _dtype(config, arch.dtype, device)
    _threads(config, device)
    context = _context_length(config, arch.max_position)
    positions = context + shape.num_steps + 2
    exchange, watch = NoExchange(), Stopwatch()
    target = load_target(config.model_path, dtype, device, exchange, positions)
    model: Eagle3Draft | None = None
    if config.speculative_draft_model_path is not None:
        model = load_draft(config.speculative_draft_model_path, target, dtype, device, exchange, positions)
    spec = None if model is None else model.spec
    if spec is not None and shape.topk > spec.draft_vocab_size:
        raise ConfigError(
            f"speculative_eagle_topk {shape.topk} is more than the draft's vocabulary of {spec.draft_vocab_size}; "
            "lower it"
        )

    geometries = [(arch.num_layers, arch.layer)] + ([(spec.num_layers, spec.layer)] if spec else [])
    token_bytes = sum(slot_bytes(n, g.kv_heads, g.head_dim, dtype) for n, g in geometries)
    pages = page_count(config, token_bytes, context, shape.window)
    rows = config.max_running_requests
    cache = KVCache(pages, config.page_size, rows, context + shape.window, not config.disable_radix_cache, device)
    bound = []
    for layers, g in geometries:
        pool = KVPool(layers, (pages + 1) * config.page_size, g.kv_heads, g.head_dim, dtype, device)
        bound.append((pool, TorchAttention(pool, g.heads, g.kv_heads, g.head_dim)))
    boundaries = spec.aux_boundaries if spec and spec.use_aux_hidden_state else ()
    target_runner = TargetRunner(target, *bound[0], boundaries, watch)
    if draft is None:
        draft = NoDraft()
        if model is not None:
            draft = drafting([DraftRunner(model, *bound[1], watch)], shape)
    carried = EagleDraftInput.create_idle_input(spec, shape.topk, dtype, device, rows)
    sampling = SamplingTable(rows, dtype, device)
    tokenizer = _tokenizer(config)
    return Engine(
        Parts(
            config=config,
            arch=arch,
            shape=shape,
            context_length=context,
            cache=cache,
            scheduler=Scheduler(config, cache, shape.window),
            assembler=Assembler(cache.table.slots, sampling, shape.window, dtype),
            sampling=sampling,
            coordinator=Coordinator(Mesh()),
            step=Step(target_runner, draft, shape, carried),
            watch=watch,
            tokenizer=tokenizer,
            metrics=EngineMetrics(model_name=Path(config.model_path).name or "model"),
            info=_info(config, shape, spec, context, str(dtype), str(device), pages, arch.vocab_size),
        )
    )


def _device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device is cuda but torch sees no CUDA device; set device to cpu or auto")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def _dtype(config: EngineConfig, stored: str, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's dtype on a GPU and float32 on a CPU, where half precision is slower."""
    automatic = "float32" if device.type == "cpu" or stored not in DTYPES else stored
    return DTYPES[automatic if config.dtype == "auto" else config.dtype]


def _threads(config: EngineConfig, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or max(1, (os.cpu_count() or 1) // config.tp_size))


def _context_length(config: EngineConfig, most: int) -> int:
    if config.context_length is not None and config.context_length > most:
        raise ConfigError(
            f"context_length {config.context_length} exceeds the target's max_position_embeddings {most}; lower it"
        )
    return config.context_length or most


def _tokenizer(config: EngineConfig) -> TextTokenizer | None:
    folder = config.tokenizer_path or config.model_path
    if config.tokenizer_path is None and not (Path(folder) / "tokenizer.json").is_file():
        return None
    return TextTokenizer.load(folder)


def _info(
    config: EngineConfig,
    shape: TreeShape,
    spec: DraftSpec | None,
    context: int,
    dtype: str,
    device: str,
    pages: int,
    vocab_size: int,
) -> dict[str, Any]:
    return {
        "config": config.model_dump(),
        "dtype": dtype.removeprefix("torch."),
        "device": device,
        "context_length": context,
        "vocab_size": vocab_size,
        "page_size": config.page_size,
        "kv_pages": pages,
        "attention_backend": "torch",
        "num_threads": torch.get_num_threads(),
        "speculative_num_steps": shape.num_steps,
        "speculative_eagle_topk": shape.topk,
        "speculative_num_draft_tokens": shape.num_draft_tokens,
        "draft": None if spec is None else {"aux_boundaries": list(spec.aux_boundaries), "num_aux": spec.num_aux},
    }
