"""Putting one rank's engine together from its config: models, pools, tables, in the order that memory wants."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cluster.arch import DraftSpec, TargetArch, read_target
from cluster.arch.draft.sample import read_sample
from cluster.arch.split import check_models, draft_of, settle
from cluster.arch.summary import computed_in
from cluster.attention.bind import bind_attention, pool_bytes
from cluster.config import ConfigError, EngineConfig, TreeShape, tiers, tree_shape
from cluster.dp_attention.coordinator import Coordinator
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import Ops, PlanRule
from cluster.engine.assemble import Assembler
from cluster.engine.calibrate import measure_pace
from cluster.engine.engine import Engine, Parts
from cluster.engine.lockstep import Lockstep
from cluster.engine.rank import Follower, Rank
from cluster.engine.sample import check_sample
from cluster.engine.scheduler import Scheduler
from cluster.forward.runner import DraftRunner, Stopwatch, TargetRunner
from cluster.forward.sampler import SamplingTable
from cluster.kv.budget import Capacity, kv_capacity, page_count
from cluster.kv.cache import KVCache
from cluster.kv.pool import Pools, SlotMemory
from cluster.mesh import Mesh, Rendezvous, Store, join
from cluster.metrics import EngineMetrics
from cluster.models.draft import Draft as DraftModel
from cluster.models.layer import NoExchange, TokenExchange
from cluster.models.load import WHOLE, Sharding, local_heads
from cluster.models.registry import load_draft_list, load_target
from cluster.spec.draft import Draft, EagleDraft, NoDraft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.multilayer import MultiLayerDraft, kept_bytes
from cluster.spec.step import Step
from cluster.text import TextTokenizer

logger = logging.getLogger(__name__)

GPU_WASTE = 0.5  # share of idle rows that a GPU pads with before it sends exact counts
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


Drafting = Callable[[list[DraftRunner], int], Draft]
"""What drafts with the configured draft's runners, given K."""


def build_engine(config: EngineConfig, draft: Draft | None = None, drafting: Drafting = EagleDraft) -> Engine:
    """The engine of `config` in a world of one, ready to step. `draft` takes the place of the configured draft's
    drafting, for tests; `drafting` makes it of the configured draft, for those who want to watch.

    Raises:
        ConfigError: something cannot run as configured; the message names the setting and the remedy.
    """
    if config.tp_size > 1:
        raise ConfigError(f"tp_size {config.tp_size} needs as many ranks and this is one; set tp_size to 1")
    engine = assemble(config, Mesh(), _device(config), draft, drafting)
    assert isinstance(engine, Engine), "a rank alone leads"
    return engine


def build_rank(config: EngineConfig, rank: int, rendezvous: Rendezvous | None, store: Store | None = None) -> Rank:
    """Rank `rank` of the gang that meets at `rendezvous`, ready to step with its peers; rank 0 brings the `store`.

    Raises:
        ConfigError: something cannot run as configured, or ranks are configured differently.
        PeerLostError: a rank did not come.
    """
    if rendezvous is None:
        return build_engine(config)
    device = _device(config)
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    check_models(config)
    mesh = join(rank, config.tp_size, config.attn_dp_size, rendezvous, device, store)
    return assemble(config, mesh, device)


def assemble(
    config: EngineConfig,
    mesh: Mesh,
    device: torch.device,
    draft: Draft | None = None,
    drafting: Drafting = EagleDraft,
) -> Rank:
    """One rank's engine on its mesh: an `Engine` where it leads its attention group, else a `Follower`.

    Raises:
        ConfigError: something cannot run as configured, or ranks are configured differently.
    """
    arch = read_target(config.model_path)
    config = settle(config, arch)
    shape = tree_shape(config)
    dtype = DTYPES[computed_in(arch.dtype, config.dtype, device.type)]
    _same_everywhere(config, mesh, arch)
    _threads(config, device)
    context = _context_length(config, arch.max_position)
    positions = context + shape.num_steps + 2
    wide = config.vocab_parallel == "world"
    apart = mesh.world.size == 1
    held_to_script = Exchange(mesh, dtype, wide)
    alone = NoExchange(mesh.world.clock)
    exchange: TokenExchange = alone if apart else held_to_script
    vocab = mesh.world.part if wide and mesh.attn_dp > 1 else mesh.attn.part
    sharding = Sharding(mesh.attn.part, mesh.world.part, vocab)
    watch = Stopwatch()
    target = load_target(config.model_path, dtype, device, exchange, sharding, positions)
    models: list[DraftModel] = []
    shared = config.speculative_draft_parallel == "sharded"
    drafts, parts = (exchange, sharding) if shared else (alone, WHOLE)
    folder, overrides = config.speculative_draft_model_path, config.speculative_draft_overrides
    if folder is not None:
        given = (folder, target, dtype, device, drafts, parts, positions, overrides, shape.num_steps)
        models = load_draft_list(*given, config.speculative_token_map)
    spec = models[0].spec if models else None
    if spec is not None and shape.topk > spec.draft_vocab_size:
        raise ConfigError(
            f"speculative_eagle_topk {shape.topk} is more than the draft's vocabulary of {spec.draft_vocab_size}; "
            "lower it"
        )

    layers = [[local_heads(g, sharding.attention) for g in arch.layers]]
    if spec is not None:
        each = [local_heads(layer.geometry, parts.attention) for layer in spec.layers]
        layers += [each] * len(models)
    token_bytes = sum(pool_bytes(each, dtype) for each in layers)
    if spec is not None:
        token_bytes += kept_bytes(len(models), spec.hidden, dtype)
    capacity = kv_capacity(config, mesh, device, token_bytes, context, shape.window)
    pages = page_count(config, capacity, shape.window)
    rows = config.max_running_requests
    cache = KVCache(pages, config.page_size, rows, context + shape.window, not config.disable_radix_cache, device)
    cache.table.journal = [] if mesh.attn.size > 1 and mesh.leads else None
    bound = [bind_attention(each, (pages + 1) * config.page_size, dtype, device) for each in layers]
    boundaries = spec.aux_boundaries if spec and spec.use_aux_hidden_state else ()
    target_runner = TargetRunner(target, *bound[0], boundaries, watch)
    sample = None
    if draft is None:
        draft = NoDraft()
        if folder is not None and spec is not None:
            sample = read_sample(folder, spec.vocab_size, spec.hidden)
            make = MultiLayerDraft if len(models) > 1 and drafting is EagleDraft else drafting
            runners = [DraftRunner(model, *own, watch) for model, own in zip(models, bound[1:], strict=True)]
            draft = make(runners, shape.topk)
    kept: list[SlotMemory] = [pool for pool, _ in bound]
    if isinstance(draft, MultiLayerDraft):
        kept.append(draft)
    carried = EagleDraftInput.create_idle_input(spec, shape.topk, dtype, device, rows + 1)
    sampling = SamplingTable(rows + 1, dtype, device)
    shapes = tiers(shape)
    rule = PlanRule(mesh.attn.size, config.dp_padding, GPU_WASTE if device.type == "cuda" else 0.0)
    target_ops = Ops() if apart else Ops(*target.ops)
    draft_ops = None if not models else Ops() if apart or not shared else Ops(*models[0].ops, len(models))
    lockstep = Lockstep(
        mesh=mesh,
        coordinator=Coordinator(mesh, rule, shapes, target_ops, draft_ops),
        exchange=held_to_script,
        assembler=Assembler(cache.table, sampling, shape.window, dtype),
        step=Step(target_runner, draft, carried, mesh.enter),
        shapes=shapes,
        pools=Pools(kept, config.page_size, device),
        debug=config.debug_lockstep,
    )
    if sample is not None and folder is not None:
        check_sample(sample, folder, lockstep, cache, context, config.speculative_token_map is not None)
    pace = None
    if config.mixed_prefill_size is None and rows * mesh.attn_dp > 1:  # else no prompt meets a request that decodes
        pace = measure_pace(lockstep, cache, config, context, arch.vocab_size)
    watch.take()
    model_name = Path(config.model_path).name or "model"
    metrics = EngineMetrics(model_name=model_name, rank=mesh.rank, depths=shape.num_steps)
    info = _info(config, mesh, shape, spec, context, str(dtype), str(device), arch.vocab_size)
    info |= _kv_info(config, capacity, pages, token_bytes, context, shape.window)
    logger.info("rank %d: KV cache of %d tokens (%s)", mesh.rank, info["kv_tokens"], info["kv_sized_by"])
    info["step_costs"] = None if pace is None else pace.described()
    if not mesh.leads:
        return Follower(lockstep, metrics, info)
    return Engine(
        Parts(
            config=config,
            arch=arch,
            shape=shape,
            context_length=context,
            cache=cache,
            scheduler=Scheduler(config, cache, shape.window, pace),
            lockstep=lockstep,
            watch=watch,
            tokenizer=_tokenizer(config),
            metrics=metrics,
            info=info,
        )
    )


def _same_everywhere(config: EngineConfig, mesh: Mesh, arch: TargetArch) -> None:
    """Refuse a gang whose ranks have different settings or models; threads and folders may differ between machines."""
    places = {"model_path", "tokenizer_path", "speculative_draft_model_path", "speculative_token_map"}
    own = config.model_dump(exclude={"num_threads", *places})
    own["target"], draft = repr(arch), config.speculative_draft_model_path
    if draft is not None:
        spec = draft_of(config, draft, arch)
        own["draft"] = repr((spec, read_sample(draft, spec.vocab_size, spec.hidden)))
    said = json.dumps(own, sort_keys=True)
    own = json.loads(said)  # as it arrives at the others: JSON has no integer keys
    for rank, text in enumerate(mesh.everyones("config", said)):
        theirs = json.loads(text)
        for name in sorted(own.keys() | theirs.keys()):
            if own.get(name) != theirs.get(name):
                raise ConfigError(
                    f"{name} is {theirs.get(name)!r} on rank {rank} and {own.get(name)!r} on rank {mesh.rank}; "
                    "all ranks of a gang need the same settings and models"
                )


def _device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError(
            "device is cuda but torch sees no CUDA device; install a CUDA build of torch, or set device to cpu"
        )
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


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
    mesh: Mesh,
    shape: TreeShape,
    spec: DraftSpec | None,
    context: int,
    dtype: str,
    device: str,
    vocab_size: int,
) -> dict[str, Any]:
    return {
        "config": config.model_dump(),
        "rank": mesh.rank,
        "dp_rank": mesh.dp_rank,
        "dtype": dtype.removeprefix("torch."),
        "device": device,
        "context_length": context,
        "vocab_size": vocab_size,
        "attention_backend": "torch",
        "num_threads": torch.get_num_threads(),
        "speculative_num_steps": shape.num_steps,
        "speculative_eagle_topk": shape.topk,
        "speculative_num_draft_tokens": shape.num_draft_tokens,
        "speculative_batch_tiers": dict(config.speculative_batch_tiers),
        "draft": None if spec is None else spec.described(),
    }


def _kv_info(
    config: EngineConfig, capacity: Capacity, pages: int, token_bytes: int, context: int, window: int
) -> dict[str, Any]:
    """The KV cache of a rank; `max_request_tokens` is the longest prompt and output together that it can hold."""
    tokens = pages * config.page_size
    return {
        "page_size": config.page_size,
        "kv_pages": pages,
        "kv_tokens": tokens,
        "kv_gb": round(tokens * token_bytes / 1e9, 3),
        "kv_sized_by": capacity.sized_by,
        "max_request_tokens": min(context, tokens - window),
    }
