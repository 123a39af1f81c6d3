"""The loaded models of one rank: the target and the draft runner list, each with its sharding and exchange."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cluster.arch import LayerGeometry, Moe
from cluster.arch.resolve import ResolvedConfig
from cluster.config import ConfigError, EngineConfig
from cluster.distributed.mesh import Mesh
from cluster.dp_attention.exchange import Exchange
from cluster.dp_attention.plan import ExpertParallel, Ops
from cluster.engine.backends import select_kernels
from cluster.kernels.interface import Kernels
from cluster.kv.pool import pool_bytes
from cluster.models.context import WHOLE, ModelContext, Sharding, part_of_experts, where_experts_are
from cluster.models.draft import DraftModel
from cluster.models.exchange import NoExchange
from cluster.models.load import local_heads
from cluster.models.registry import load_draft_list, load_target
from cluster.models.target import DecoderTarget
from cluster.sampling.noise import at_least_float32
from cluster.sampling.sharded import ShardedHead
from cluster.spec.multilayer import kept_bytes

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

KNOWS_FP8 = 8, 9
"""The lowest compute capability of GPUs that convert FP8 e4m3 in hardware, and for which Triton supports it."""


@dataclass(frozen=True, slots=True)
class RankModels:
    """One rank's part of the models and the contexts in which they compute. `exchange` checks its calls against the
    script. The context of a model that each rank computes alone has another exchange.
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
        said = [f"target: {line}" for line in self.target.quantised]
        return (*said, *(f"draft {i}: {line}" for i, draft in enumerate(self.drafts) for line in draft.quantised))

    @property
    def experts(self) -> tuple[str, ...]:
        """Sentences about where the experts of each model are. Empty without experts."""
        of_target, of_draft = self.resolved.experts
        tp, ep = self.resolved.settings.tp_size, self.resolved.settings.ep_size
        said = [] if of_target is None else [f"target: {where_experts_are(of_target, ep, tp)}"]
        if of_draft is not None and self.resolved.draft_is_sharded:
            said.append(f"draft: {where_experts_are(of_draft, ep, tp)}")
        elif of_draft is not None:
            said.append(f"draft: {where_experts_are(of_draft, 1, 1)}, all on every rank")
        return tuple(said)

    @property
    def attention(self) -> tuple[str, ...]:
        """Sentences about attention that other kernels compute if the backend is FlashInfer. Empty if it is not."""
        flashinfer, resolved, said = self.kernels.flashinfer, self.resolved, list[str]()
        if flashinfer is None:
            return ()
        most = max(resolved.chunk_rows, resolved.settings.max_running_requests * resolved.forced_shape.window)
        for at, layers in enumerate(self.layers):
            name = f"draft {at - 1}" if at else "target"
            said += [f"{name}, {line}" for line in flashinfer.left(layers, most)]
            if at > 1:
                said.append(f"{name}: all by Triton: rows of a later runner do not see the first cells")
        return tuple(said)

    @property
    def layers(self) -> list[list[LayerGeometry]]:
        """The layers of every runner, with the heads that this rank holds; the target's first."""
        attention = self.target_context.sharding.attention
        layers = [[local_heads(g, attention) for g in self.resolved.target.layers]]
        if (spec := self.resolved.draft) is not None:
            own = self.draft_context.sharding.attention
            layers += [[local_heads(layer.geometry, own) for layer in spec.layers] for _ in self.drafts]
        return layers

    @property
    def token_bytes(self) -> int:
        """Bytes per token in the pools of all runners and in the hidden states that a multi-layer draft keeps."""
        beside = 0
        if (spec := self.resolved.draft) is not None:
            beside = kept_bytes(len(self.drafts), spec.hidden, self.dtype)
        return sum(pool_bytes(layers, self.dtype, self.resolved.fp8_cache) for layers in self.layers) + beside

    @property
    def ops(self) -> tuple[Ops, Ops | None]:
        """The exchange calls of the target and of the draft, or None in place of the draft's if there is no draft. A
        model that each rank computes alone makes no calls.
        """
        of_target, of_draft = self.resolved.experts
        target = self._ops(self.target, of_target) if self.target_context.exchange is self.exchange else Ops()
        if not self.drafts:
            return target, None
        held = self.draft_context.exchange is self.exchange
        return target, self._ops(self.drafts[0], of_draft)._replace(runners=len(self.drafts)) if held else Ops()

    def _ops(self, model: DecoderTarget | DraftModel, moe: Moe | None) -> Ops:
        forward, head, width, columns = model.ops
        bits = 8 * at_least_float32(self.dtype).itemsize
        sharded = None if self.exchange.shards is None else ShardedHead(columns, bits, self.exchange.wide)
        parts = self.target_context.sharding.experts.size
        apart = None if moe is None or parts == 1 else ExpertParallel(parts, moe.active)
        return Ops(forward, head, width, columns, sharded, apart=apart)


def device_facts(config: EngineConfig, device: torch.device) -> tuple[str, Callable[[], bool]]:
    """Return what `resolve_models` must know of a rank: its kind of device, and whether the kernels are in C."""
    return device.type, lambda: select_kernels(config.attention_backend, device, torch.bfloat16).library is not None


def kernels_of(resolved: ResolvedConfig, device: torch.device) -> Kernels:
    """Return the kernels of all models.

    Raises:
        ConfigError: the kernels that are set are not available here.
    """
    kernels = select_kernels(resolved.settings.attention_backend, device, DTYPES[resolved.dtype])
    if resolved.fp8_cache and kernels.name == "triton" and device.type == "cuda":
        _refuse_gpus_without_fp8(torch.cuda.get_device_capability(device))
    if kernels.flashinfer is not None:
        shares = [kernels.flashinfer.share(layer) for layer in resolved.target.layers]
        if not any(share.trees or share.texts for share in shares):
            raise ConfigError(
                f"attention_backend flashinfer has no part in this target: {shares[0].why}; set it to triton"
            )
    return kernels


def _refuse_gpus_without_fp8(capability: tuple[int, int]) -> None:
    if capability < KNOWS_FP8:
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
    wide = config.vocab_parallel == "world"
    exchange, alone = Exchange(mesh, dtype, wide, config.ep_size), NoExchange(mesh.world.clock)
    vocab = mesh.world.part if wide and mesh.attn_dp > 1 else mesh.attn.part
    sharding = Sharding(mesh.attn.part, mesh.world.part, vocab, part_of_experts(config.ep_size, mesh.world.part))
    sharded = ModelContext(dtype, device, alone if mesh.world.size == 1 else exchange, sharding, max_position, kernels)
    own = sharded if resolved.draft_is_sharded else replace(sharded, exchange=alone, sharding=WHOLE)
    target = load_target(config.model_path, resolved.target, sharded)
    drafts: list[DraftModel] = []
    if resolved.draft is not None and config.speculative_draft_model_path is not None:
        folder = config.speculative_draft_model_path
        drafts = load_draft_list(folder, resolved.draft, target, own, resolved.runners)
    return RankModels(resolved, exchange, target, drafts, sharded, own)
