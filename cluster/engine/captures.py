"""What of a rank's steps is captured: at which sizes, by what, and before the first request."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from cluster.batch import DecodeRequest, SamplingMode, StepInput
from cluster.capture.buffers import Buffers
from cluster.capture.cuda_graph import CudaSegments, Graph
from cluster.capture.tape import Tape
from cluster.config import ConfigError, EngineConfig
from cluster.config.tree_shape import TreeShape
from cluster.distributed.mesh import Mesh
from cluster.dp_attention.sizes import MOST_ROWS, Buckets, Sizes, multiples, sizes_up_to
from cluster.engine.lockstep import Lockstep
from cluster.engine.models import RankModels
from cluster.engine.programs import Capture
from cluster.kernels.c_operators import operators_of
from cluster.kernels.grouped_mm import reads_ends
from cluster.status import CaptureInfo

logger = logging.getLogger(__name__)

MODES = (SamplingMode(0), SamplingMode.NOISY, SamplingMode.NOISY | SamplingMode.FILTERED)
AUTO_BYTES = 1 << 28  # that programs may take where no setting asks for them
LARGEST = 512  # rows of decoding requests, or of prompts, that a GPU's steps are padded to unless settings say more
NOT_YET = "graphs of FlashInfer's kernels have not run on a GPU yet; capture on captures steps that decode"
BY_RANKS = "a rank whose plan of FlashInfer's comes out unlike the captured one would launch anew what others replay"
BY_TORCH = "attention by torch reads as far as the longest request may be, which a graph would fix"
BY_EXPERTS = "products of experts wait for the host, unless they are in bfloat16 on a Hopper or Blackwell GPU"
UNEVEN = "with dp_padding exact groups exchange parts of different sizes, which a graph is not to hold"


@dataclass(frozen=True, slots=True)
class Captures:
    """`capture` makes a program of a step, `buckets` are the sizes for which."""

    capture: Capture
    buckets: Buckets


def captures_of(config: EngineConfig, device: torch.device, models: RankModels, mesh: Mesh) -> Captures | None:
    """How programs are captured, None: not at all, which the log explains.

    By default of steps without prompts, which recur: on a GPU with Triton's kernels, whose launches say nothing of
    lengths, and on a CPU with the kernels in C, whose calls are replayed faster than torch makes them anew, there as
    many rows as keep all programs within `AUTO_BYTES`. With FlashInfer the same steps, but only where it is asked for.

    Raises:
        ConfigError: the device has no attention that can be captured, or sizes do not suit the ranks.
    """
    if device.type == "cuda":
        return _graphs(config, models, mesh)
    library = models.kernels.library
    capture = partial(Tape, buffers=Buffers(), substitute=operators_of(library))
    if config.capture == "on":
        return Captures(capture, buckets_of(config, device, mesh))
    rows = AUTO_BYTES // row_bytes(models)
    if config.capture == "off" or library is None or not rows:
        return None
    sizes = buckets_of(config, device, mesh).sizes
    return Captures(capture, Buckets(sizes, min(MOST_ROWS, rows), prompts=False))


def _graphs(config: EngineConfig, models: RankModels, mesh: Mesh) -> Captures | None:
    if config.capture == "off":
        return None
    kernels, why, remedy = models.kernels, "", "attention_backend to triton"
    experts = any(part is not None for part in models.resolved.experts)
    capability = torch.cuda.get_device_capability()
    if experts and not reads_ends(models.dtype, capability):
        why, remedy = BY_EXPERTS, "dtype to bfloat16" if reads_ends(torch.bfloat16, capability) else ""
    elif kernels.name not in ("triton", "flashinfer"):
        why = BY_TORCH
    elif kernels.flashinfer is not None and mesh.world.size > 1:
        why = BY_RANKS
    elif config.dp_padding == "exact" and mesh.attn_dp > 1:
        why, remedy = UNEVEN, "dp_padding to auto or padded"
    if why and config.capture == "on":
        raise ConfigError(f"capture on: {why}; set {remedy}{', or ' * bool(remedy)}capture to auto or off")
    if kernels.flashinfer is not None and config.capture == "auto":
        why = why or NOT_YET
    if why:
        logger.info("rank %d: steps are launched anew, not captured: %s", mesh.rank, why)
        return None
    buckets, segments = buckets_of(config, torch.device("cuda"), mesh), CudaSegments()
    if kernels.flashinfer is not None:  # graphs are planned for a fixed number of texts, which no key has
        buckets = replace(buckets, prompts=False)
    return Captures(lambda program: Graph(program, segments), buckets)


def row_bytes(models: RankModels) -> int:
    """About what the buffers of all tapes take for one row of the target, on every rank alike: one layer's work, as the
    next layer works in the same memory, and logits twice; all that again, as tapes of few rows have their own.
    """
    arch = models.resolved.target
    layer = max(8 * one.hidden + 3 * one.mlp_columns + 2 * one.heads * one.head_dim for one in arch.layers)
    return 2 * (layer + 2 * arch.vocab_size) * models.dtype.itemsize


def buckets_of(config: EngineConfig, device: torch.device, mesh: Mesh) -> Buckets:
    """Those of the settings; else few sizes on a GPU, which pads, and exact ones on a CPU, which pays for each row.

    On GPUs the ranks of several groups carry equal shares of every group's rows in a captured step, so sizes are
    multiples of the ranks of a group.

    Raises:
        ConfigError: those of the settings are not.
    """
    if device.type != "cuda":
        return Buckets() if config.capture_sizes is None else Buckets(config.capture_sizes)
    sizes, shares = config.capture_sizes, mesh.attn.size if mesh.attn_dp > 1 else 1
    if sizes is None:
        sizes = multiples(sizes_up_to(max(LARGEST, config.max_running_requests)), shares)
    if odd := [size for size in sizes if size % shares]:
        raise ConfigError(
            f"capture_sizes has {odd[0]}, which the {shares} ranks of an attention group cannot share evenly; "
            f"give multiples of {shares}"
        )
    return Buckets(sizes, prompts=config.capture == "on", alike=mesh.attn_dp > 1)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Steps in which `requests` requests decode with trees of tier `num_steps`."""

    requests: int
    num_steps: int
    mode: SamplingMode


def decoding_steps(config: EngineConfig, deepest: TreeShape, buckets: Buckets) -> Iterator[Decoding]:
    """One for each program of decoding that loads can need which are alike in all groups, log-probabilities left out;
    largest first, so that on a GPU the others fit in its memory.
    """
    for span in reversed(buckets.spans()):
        if Sizes(span.stop - 1, 0, 0).rows(deepest.num_draft_tokens) > MOST_ROWS:
            continue
        numbers = range(span.start, min(span.stop, config.max_running_requests + 1))
        tiers = {config.levels_at(number, deepest.num_steps) for number in numbers}
        yield from (Decoding(span.stop - 1, tier, mode) for tier in sorted(tiers, reverse=True) for mode in MODES)


def capture_decoding(lockstep: Lockstep, config: EngineConfig, buckets: Buckets) -> CaptureInfo:
    """Capture them, with idle requests, before the first request; all ranks must call this."""
    began, programs = time.perf_counter(), lockstep.programs
    for step in decoding_steps(config, lockstep.shapes[-1], buckets):
        order = StepInput(decodes=(DecodeRequest(programs.assembler.idle_row, 0),) * step.requests, mode=step.mode)
        for _ in range(2 * programs.assembler.turns):  # the first run makes what is made once, the second is captured
            ran = lockstep.run(order if lockstep.mesh.leads else StepInput(), 0, step.num_steps)
            if ran.output is not None:
                lockstep.read(ran)
        programs.keep()
    lockstep.mesh.world.clock.split()
    held = sum(program.captured.bytes for program in programs.captured.values())
    return CaptureInfo(
        sizes=buckets.sizes,
        programs=len(programs.captured),
        mb=round(held / 1e6, 3),
        seconds=round(time.perf_counter() - began, 3),
    )
