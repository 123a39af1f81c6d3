"""Decides which steps of a rank are captured, at which sizes and how; captures decoding before the first request."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from cluster.arch import TargetArch
from cluster.arch.layer import LayerGeometry
from cluster.arch.resolve import ResolvedConfig
from cluster.batch import DecodeRequest, ExtendMode, SamplingMode, StepInput
from cluster.capture.buffers import Buffers
from cluster.capture.cuda_graph import CudaSegments, Graph
from cluster.capture.tape import Tape
from cluster.config import ConfigError, EngineConfig
from cluster.config.speculation import MISSED_TOKENS
from cluster.distributed.mesh import Mesh
from cluster.dp_attention.facts import TreeVote
from cluster.dp_attention.sizes import MAX_CAPTURED_ROWS, Buckets, Sizes, multiples, sizes_up_to
from cluster.engine.lockstep import Lockstep
from cluster.engine.models import RankModels
from cluster.engine.programs import Capture
from cluster.kernels.c_operators import operators_of
from cluster.kernels.grouped_mm import reads_ends
from cluster.status import CaptureInfo

logger = logging.getLogger(__name__)

MODES = (SamplingMode(0), SamplingMode.RANDOM, SamplingMode.RANDOM | SamplingMode.FILTERED)
AUTO_BYTES = 1 << 28  # most memory of all tapes (the captured programs of a CPU) with capture auto
MAX_DEFAULT_SIZE = 512  # largest default size on a GPU (requests or prompt rows), unless max_running_requests is larger
CHUNK_SIZES = (4, 8, 16, 32, 64, 128, 256)
"""Numbers of prompt rows of captured steps on a CPU. A replay saves about 4 ms, however many rows the step has. That is
a large part of the time of a step with few rows, and a small part of the time of a step with more rows.
"""
FLASHINFER_REASON = (
    "graphs of whole steps with FlashInfer have not run on a GPU yet; capture on captures steps that decode"
)
RANKS_REASON = (
    "a rank whose plan of FlashInfer's comes out unlike the captured one would run eagerly what others replay"
)
TORCH_REASON = "attention by torch reads as far as the longest request may be, which a graph would fix"
EXPERTS_REASON = "products of experts wait for the host, unless they are in bfloat16 on a Hopper or Blackwell GPU"
UNEVEN_REASON = "with dp_padding exact groups exchange parts of different sizes, which no graph may contain"


@dataclass(frozen=True, slots=True)
class Captures:
    """How steps are captured: `capture` captures one step, `buckets` are the sizes of programs."""

    capture: Capture
    buckets: Buckets


def captures_of(config: EngineConfig, device: torch.device, models: RankModels, mesh: Mesh) -> Captures | None:
    """Return how steps are captured, or None if no step is. On a GPU the log then says why, unless capture is off.

    By default steps without prompts are captured, because they recur. On a GPU this needs Triton's kernels, whose
    launches do not depend on lengths. On a CPU it needs the kernels in C, which replay faster than torch runs eagerly;
    the rows of a captured step are limited, so that all tapes stay within `AUTO_BYTES`. Unless `capture_sizes` is set,
    a CPU also captures steps in which no prompt ends. The scheduler gives such steps one of `CHUNK_SIZES` prompt rows,
    so that they recur. With FlashInfer, steps are captured only if `capture` is on.

    Raises:
        ConfigError: capture is on, but these kernels and settings cannot capture; or sizes do not suit the ranks.
    """
    if device.type == "cuda":
        return _graphs(config, models, mesh)
    library = models.kernels.library
    capture = partial(Tape, buffers=Buffers(), substitute=operators_of(library))
    if config.capture == "on":
        return Captures(capture, buckets_of(config, device, mesh))
    rows = AUTO_BYTES // row_bytes(models.resolved.target, models.dtype)
    if config.capture == "off" or library is None or not rows:
        return None
    sizes, rows = buckets_of(config, device, mesh).sizes, min(MAX_CAPTURED_ROWS, rows)
    chunk_sizes = () if sizes else CHUNK_SIZES
    return Captures(capture, Buckets(sizes, rows, allow_prompts=bool(chunk_sizes), chunk_sizes=chunk_sizes))


def _graphs(config: EngineConfig, models: RankModels, mesh: Mesh) -> Captures | None:
    """Return what `captures_of` returns on a GPU. If steps cannot be captured, raise an error if capture is on, and
    otherwise log the reason.
    """
    if config.capture == "off":
        return None
    kernels, reason, remedy = models.kernels, "", "attention_backend to triton"
    experts = any(experts_of_model is not None for experts_of_model in models.resolved.experts)
    capability = torch.cuda.get_device_capability()
    if experts and not reads_ends(models.dtype, capability):
        reason, remedy = EXPERTS_REASON, "dtype to bfloat16" if reads_ends(torch.bfloat16, capability) else ""
    elif kernels.name not in ("triton", "flashinfer"):
        reason = TORCH_REASON
    elif kernels.flashinfer is not None and mesh.world.size > 1:
        reason = RANKS_REASON
    elif config.dp_padding == "exact" and mesh.attn_dp > 1:
        reason, remedy = UNEVEN_REASON, "dp_padding to auto or padded"
    if reason and config.capture == "on":
        raise ConfigError(f"capture on: {reason}; set {remedy}{', or ' * bool(remedy)}capture to auto or off")
    if kernels.flashinfer is not None and config.capture == "auto":
        reason = reason or FLASHINFER_REASON
    if reason:
        logger.info("rank %d: steps run eagerly, not captured: %s", mesh.rank, reason)
        return None
    buckets, segments = buckets_of(config, torch.device("cuda"), mesh), CudaSegments()
    if kernels.flashinfer is not None:  # its graphs have a fixed number of prompt chunks, which is not in the key
        buckets = replace(buckets, allow_prompts=False)
    return Captures(lambda program: Graph(program, segments), buckets)


def row_bytes(target: TargetArch, dtype: torch.dtype) -> int:
    """Estimate the bytes of all tapes' buffers per target row; the same on every rank. The estimate is 2 x (the
    activations of the largest layer + two sets of logits). Layers reuse the memory of the largest one. The factor 2 is
    for tapes of few rows, which have buffers of their own beside those of many rows.
    """
    layer_numbers = max(
        8 * layer.hidden + _mlp_numbers(layer) + 2 * layer.heads * layer.head_dim for layer in target.layers
    )
    return 2 * (layer_numbers + 2 * target.vocab_size) * dtype.itemsize


def _mlp_numbers(layer: LayerGeometry) -> int:
    """Return how many numbers a layer's MLP keeps per row: gate, up and their product. With experts each of the row's
    `active` experts also has a copy of the row and an output.
    """
    if layer.moe is None:
        return 3 * layer.intermediate
    moe = layer.moe
    return moe.active * (3 * moe.intermediate + 2 * layer.hidden) + 3 * moe.shared


def buckets_of(config: EngineConfig, device: torch.device, mesh: Mesh) -> Buckets:
    """Return the sizes of programs: `capture_sizes` if it is set. Otherwise programs on a GPU have a few fixed sizes,
    to which steps are padded, and programs on a CPU have exactly the sizes that occur.

    With several groups on GPUs, the ranks of a group must carry equal shares of its rows in a captured step, so sizes
    are multiples of the number of ranks in a group.

    Raises:
        ConfigError: `capture_sizes` has a size that is not such a multiple.
    """
    if device.type != "cuda":
        return Buckets() if config.capture_sizes is None else Buckets(config.capture_sizes)
    sizes, group_ranks = config.capture_sizes, mesh.attn.size if mesh.attn_dp > 1 else 1
    if sizes is None:
        sizes = multiples(sizes_up_to(max(MAX_DEFAULT_SIZE, config.max_running_requests)), group_ranks)
    if uneven_sizes := [size for size in sizes if size % group_ranks]:
        raise ConfigError(
            f"capture_sizes has {uneven_sizes[0]}, which the {group_ranks} ranks of an attention group cannot share "
            f"evenly; give multiples of {group_ranks}"
        )
    return Buckets(sizes, allow_prompts=config.capture == "on", equal_sizes=mesh.attn_dp > 1)


@dataclass(frozen=True, slots=True)
class Decoding:
    """A step to capture: `requests` requests decode with trees of shape number `tier`, and draw tokens in `mode`.

    In a step without trees the draft may rest, that is, not read the new tokens. If `wakes`, the later step in which
    the draft reads them is captured too.
    """

    requests: int
    tier: int
    mode: SamplingMode
    wakes: bool = False


def decoding_steps(resolved: ResolvedConfig, buckets: Buckets) -> Iterator[Decoding]:
    """Yield one step for each program that decoding can need if all groups have the same load, for the common `MODES`.
    The largest steps come first, so that on a GPU the programs of smaller steps can use the memory of larger ones.
    """
    for size_range in reversed(buckets.padded_ranges()):
        if Sizes(size_range.stop - 1, 0, 0).rows(resolved.shape.num_draft_tokens) > MAX_CAPTURED_ROWS:
            continue
        request_counts = range(size_range.start, min(size_range.stop, resolved.settings.max_running_requests + 1))
        tiers = {resolved.max_tier(count) for count in request_counts}
        if resolved.adaptive_trees and tiers:
            tiers = set(range(max(tiers) + 1))
        may_wake = len(tiers) > 1 and (size_range.stop - 1) * MISSED_TOKENS <= MAX_CAPTURED_ROWS
        yield from (
            Decoding(size_range.stop - 1, tier, mode, may_wake and not tier)
            for tier in sorted(tiers, reverse=True)
            for mode in MODES
        )


def capture_decoding(lockstep: Lockstep, resolved: ResolvedConfig, buckets: Buckets) -> CaptureInfo:
    """Capture all `decoding_steps` with idle requests (padding), before the first real request. All ranks must call
    this.
    """
    started, programs = time.perf_counter(), lockstep.programs
    runs = 2 * programs.assembler.buffer_sets  # for each buffer set: an eager run, then the run that is captured
    for step in decoding_steps(resolved, buckets):
        for _ in range(runs):
            while (mode := _run_idle(lockstep, step, step.tier)) is ExtendMode.MISSED:
                pass  # the draft has rested, and this step only wakes it: run the step once more
        for _ in range(runs if step.wakes and mode.rests else 0):
            for tier in (1, 1, 0):  # wake, draft, rest: an odd number of steps, so that two buffer sets take turns
                _run_idle(lockstep, step, tier)
        programs.pin_all()
    lockstep.mesh.world.clock.take_collective_spans()
    captured_bytes = sum(program.captured.bytes for program in programs.captured.values())
    return CaptureInfo(
        sizes=buckets.sizes,
        programs=len(programs.captured),
        mb=round(captured_bytes / 1e6, 3),
        seconds=round(time.perf_counter() - started, 3),
    )


def _run_idle(lockstep: Lockstep, step: Decoding, tier: int) -> ExtendMode:
    """Run a step of idle requests with trees of tier `tier`; return which rows its draft read."""
    idle = DecodeRequest(lockstep.programs.assembler.idle_row, 0)
    step_input = StepInput(decodes=(idle,) * step.requests, mode=step.mode)
    in_flight = lockstep.run(step_input if lockstep.mesh.is_leader else StepInput(), 0, TreeVote(tier))
    if in_flight.output is not None:
        lockstep.read(in_flight)
    return in_flight.plan.extend_mode
