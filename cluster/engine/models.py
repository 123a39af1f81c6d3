"""The loaded models of one rank: the target and the draft runner list, each with its sharding and exchange."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from cluster.arch import LayerGeometry, Moe
from cluster.arch.resolve import ResolvedConfig
from cluster.arch.windows import WindowLayout, window_layout
from cluster.config import ConfigError, EngineConfig
from cluster.distributed.mesh import Mesh
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import ExpertParallel, Ops
from cluster.engine.backends import select_kernels
from cluster.kernels.interface import Kernels
from cluster.kv.pool import pool_bytes
from cluster.kv.pool_sizes import PoolSizes, WindowNeeds
from cluster.models.context import UNSHARDED, ModelContext, Sharding, describe_expert_placement, expert_shard
from cluster.models.draft import DraftModel
from cluster.models.exchange import NoExchange
from cluster.models.load import local_heads
from cluster.models.registry import load_draft_list, load_target
from cluster.models.target import DecoderTarget
from cluster.sampling.noise import at_least_float32
from cluster.sampling.sharded import ShardedHead
from cluster.spec.multilayer import buffer_bytes

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MIN_FP8_CAPABILITY = 8, 9
"""The lowest compute capability of GPUs that convert FP8 e4m3 in hardware, and for which Triton supports it."""


@dataclass(frozen=True, slots=True)
class RankModels:
    """One rank's part of the models and the contexts in which they compute. `exchange` runs the collectives of the
    models; it compares each call with the script, which lists the calls of the step. A model that each rank computes
    alone has a `NoExchange` in its context instead.
    """

    resolved: ResolvedConfig
    exchange: Exchange
    target: DecoderTarget
    drafts: list[DraftModel]
    target_context: ModelContext
    draft_context: ModelContext

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype of all models."""
        return self.target_context.dtype

    @property
    def kernels(self) -> Kernels:
        """The kernels of all models."""
        return self.target_context.kernels

    @property
    def quantised(self) -> tuple[str, ...]:
        """Sentences about quantised weights: which stay packed, which were dequantised. Empty if there are none."""
        lines = [f"target: {line}" for line in self.target.quantised]
        return (*lines, *(f"draft {i}: {line}" for i, draft in enumerate(self.drafts) for line in draft.quantised))

    @property
    def experts(self) -> tuple[str, ...]:
        """Sentences about where the experts of each model are. Empty without experts."""
        target_experts, draft_experts = self.resolved.experts
        tp, ep = self.resolved.settings.tp_size, self.resolved.settings.ep_size
        lines = [] if target_experts is None else [f"target: {describe_expert_placement(target_experts, ep, tp)}"]
        if draft_experts is not None and self.resolved.draft_is_sharded:
            lines.append(f"draft: {describe_expert_placement(draft_experts, ep, tp)}")
        elif draft_experts is not None:
            lines.append(f"draft: {describe_expert_placement(draft_experts, 1, 1)}, all on every rank")
        return tuple(lines)

    @property
    def attention(self) -> tuple[str, ...]:
        """Sentences that say which attention other kernels compute in place of FlashInfer. Empty for other backends."""
        flashinfer, resolved, lines = self.kernels.flashinfer, self.resolved, list[str]()
        if flashinfer is None:
            return ()
        max_rows = max(resolved.chunk_rows, resolved.settings.max_running_requests * resolved.forced_shape.window)
        for index, layers in enumerate(self.layers):
            name = f"draft {index - 1}" if index else "target"
            if index and not self.drafts[index - 1].spec.keeps_kv:
                lines.append(f"{name}: all by Triton: its rows see only committed tokens")
                continue
            lines += [f"{name}, {line}" for line in flashinfer.triton_layers(layers, max_rows)]
            if index > 1:
                lines.append(f"{name}: all by Triton: rows of a later runner do not see the first cells")
        return tuple(lines)

    @property
    def layers(self) -> list[list[LayerGeometry]]:
        """The layers of every runner, with the heads that this rank holds. The first entry is that of the target."""
        attention = self.target_context.sharding.attention
        layers = [[local_heads(geometry, attention) for geometry in self.resolved.target.layers]]
        if (spec := self.resolved.draft) is not None:
            draft_sharding = self.draft_context.sharding.attention
            layers += [[local_heads(layer.geometry, draft_sharding) for layer in spec.layers] for _ in self.drafts]
        return layers

    @property
    def window_needs(self) -> WindowNeeds | None:
        """What requests need in window pools; None if this rank has none."""
        resolved, layout = self.resolved, self.window_layout
        if layout is None:
            return None
        page_size, requests = resolved.settings.page_size, resolved.settings.max_running_requests
        sample_tokens = 0 if resolved.sample is None else len(resolved.sample.tokens)  # read as one chunk at start
        chunk_tokens = max((1 + resolved.steps_ahead) * resolved.chunk_rows, sample_tokens)
        ratio = resolved.settings.swa_full_tokens_ratio
        chunk_pages = -(-chunk_tokens // page_size)
        return WindowNeeds(layout.reach, layout.written, layout.request_pages, chunk_pages, requests, ratio)

    @property
    def window_layout(self) -> WindowLayout | None:
        """The layout that says which layers are in window pools; None if no layer is. With FlashInfer, and if
        `swa_full_tokens_ratio` is 1, all layers are in the other pools: FlashInfer's plans have one list of pages.
        """
        resolved = self.resolved
        if self.kernels.flashinfer is not None or resolved.settings.swa_full_tokens_ratio == 1:
            return None
        layers = [layer for layers in self.layers for layer in layers]
        return window_layout(layers, resolved, resolved.context_length, len(self.drafts), resolved.steps_ahead)

    def is_windowed(self, layers: Sequence[LayerGeometry]) -> list[bool]:
        """Return for each layer of a runner whether it is in a window pool."""
        layout = self.window_layout
        return [layout is not None and layout.holds(layer) for layer in layers]

    @property
    def pool_sizes(self) -> PoolSizes:
        """Bytes per token in the pools of all runners and in the hidden states that a multi-layer draft keeps."""
        token_bytes = window_bytes = 0
        if (spec := self.resolved.draft) is not None:
            token_bytes = buffer_bytes(len(self.drafts), spec.hidden, self.dtype)
        for layers in self.layers:
            for layer, in_window in zip(layers, self.is_windowed(layers), strict=True):
                layer_bytes = pool_bytes([layer], self.dtype, self.resolved.fp8_cache)
                token_bytes, window_bytes = (
                    token_bytes + layer_bytes * (not in_window),
                    window_bytes + layer_bytes * in_window,
                )
        return PoolSizes(self.resolved.settings.page_size, token_bytes, window_bytes, self.window_needs)

    @property
    def ops(self) -> tuple[Ops, Ops | None]:
        """The exchange calls of the target and of the draft; the second is None if there is no draft. A model that each
        rank computes alone makes no calls.
        """
        target_experts, draft_experts = self.resolved.experts
        target = self._ops(self.target, target_experts) if self.target_context.exchange is self.exchange else Ops()
        if not self.drafts:
            return target, None
        if self.draft_context.exchange is not self.exchange:
            return target, Ops()
        draft = self._ops(self.drafts[0], draft_experts)
        embed_width = self.drafts[0].spec.hidden  # that of the target's embedding, if a draft uses it
        return target, draft._replace(runners=len(self.drafts), embed_width=embed_width)

    def _ops(self, model: DecoderTarget | DraftModel, moe: Moe | None) -> Ops:
        forward, head, width, columns = model.exchange_calls
        bits = 8 * at_least_float32(self.dtype).itemsize
        sharded_head = None if self.exchange.shards is None else ShardedHead(columns, bits, self.exchange.over_world)
        expert_shards = self.target_context.sharding.experts.size
        expert_parallel = None if moe is None or expert_shards == 1 else ExpertParallel(expert_shards, moe.active)
        return Ops(forward, head, width, columns, sharded_head, expert_parallel=expert_parallel)


def device_facts(config: EngineConfig, device: torch.device) -> tuple[str, Callable[[], bool]]:
    """Return the last two arguments of `resolve_models` for a rank: its kind of device, and a function that returns
    whether its kernels are in C.
    """
    return device.type, lambda: select_kernels(config.attention_backend, device, torch.bfloat16).library is not None


def kernels_of(resolved: ResolvedConfig, device: torch.device) -> Kernels:
    """Return the kernels of all models.

    Raises:
        ConfigError: the kernels that are set are not available here, or cannot serve this target or its KV cache dtype.
    """
    kernels = select_kernels(resolved.settings.attention_backend, device, DTYPES[resolved.dtype])
    if resolved.fp8_cache and kernels.name == "triton" and device.type == "cuda":
        _refuse_fp8(torch.cuda.get_device_capability(device), DTYPES[resolved.dtype])
    if kernels.flashinfer is not None:
        shares = [kernels.flashinfer.share(layer) for layer in resolved.target.layers]
        if not any(share.trees or share.texts for share in shares):
            raise ConfigError(
                f"attention_backend flashinfer has no part in this target: {shares[0].reason}; set it to triton"
            )
    return kernels


def _refuse_fp8(capability: tuple[int, int], dtype: torch.dtype) -> None:
    """Raise an error if Triton cannot compile attention over FP8 caches for this GPU and this dtype."""
    if dtype == torch.float64:
        raise ConfigError(
            "kv_cache_dtype fp8_e4m3 with attention in Triton cannot be compiled for dtype float64 on a GPU; set dtype "
            "to bfloat16, or kv_cache_dtype to auto"
        )
    if capability < MIN_FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype fp8_e4m3 with attention in Triton needs a GPU of compute capability 8.9 or more, and this "
            f"one has {capability[0]}.{capability[1]}; set kv_cache_dtype to auto, or attention_backend to torch"
        )


def load_models(
    resolved: ResolvedConfig, mesh: Mesh, device: torch.device, kernels: Kernels, max_position: int
) -> RankModels:
    """Load this rank's part of all models, for positions below `max_position` (the size of rotary tables).

    Raises:
        ConfigError: a tensor is missing, unknown or of the wrong shape.
    """
    config, dtype = resolved.settings, DTYPES[resolved.dtype]
    over_world = config.vocab_parallel == "world"
    exchange, no_exchange = Exchange(mesh, dtype, over_world, config.ep_size), NoExchange(mesh.world.clock)
    vocab = mesh.world.shard if over_world and mesh.attn_dp > 1 else mesh.attn.shard
    sharding = Sharding(mesh.attn.shard, mesh.world.shard, vocab, expert_shard(config.ep_size, mesh.world.shard))
    sharded_context = ModelContext(
        dtype, device, no_exchange if mesh.world.size == 1 else exchange, sharding, max_position, kernels
    )
    draft_context = (
        sharded_context
        if resolved.draft_is_sharded
        else replace(sharded_context, exchange=no_exchange, sharding=UNSHARDED)
    )
    target = load_target(config.model_path, resolved.target, sharded_context)
    drafts: list[DraftModel] = []
    if resolved.draft is not None and config.speculative_draft_model_path is not None:
        folder = config.speculative_draft_model_path
        drafts = load_draft_list(folder, resolved.draft, target, draft_context, resolved.num_draft_runners)
    return RankModels(resolved, exchange, target, drafts, sharded_context, draft_context)
