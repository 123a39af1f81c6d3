"""Measures the device memory that steps take besides weights and KV caches, by running the largest steps allowed.

The KV cache gets the rest. This is for devices with memory of their own; on a CPU nothing is measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from cluster.arch.resolve import ResolvedConfig
from cluster.batch import DecodeRequest, PromptChunk, SamplingMode, StepInput
from cluster.config import ConfigError
from cluster.distributed.mesh import Mesh
from cluster.dp_attention.facts import TreeVote
from cluster.engine.captures import captures_of
from cluster.engine.lockstep import Lockstep
from cluster.engine.memory import RankMemory, allocate_pages
from cluster.engine.models import RankModels
from cluster.engine.prefill import SCORED_ROWS
from cluster.kv.budget import GB, Capacity, MemoryBreakdown
from cluster.kv.device_memory import OUT_OF_MEMORY, DeviceMemory
from cluster.kv.page_table import PageTable

SAMPLING_MODES = SamplingMode.RANDOM | SamplingMode.FILTERED | SamplingMode.LOGPROBS | SamplingMode.ADJUSTED
ALL_MODES = SAMPLING_MODES | SamplingMode.CONSTRAINED | SamplingMode.TREES | SamplingMode.PROMPT_LOGPROBS
SMALLER_KV = "max_total_tokens, kv_cache_gb, mem_fraction_static or capture_sizes"
MIN_ADVISED_ROWS = 16  # the lowest chunked_prefill_size that an error advises
T = TypeVar("T")
Measure = Callable[[int, int], int]
"""A function that takes a number of requests and a number of prompt rows. It returns the bytes that the largest step of
this size takes, or raises one of `OUT_OF_MEMORY`.
"""


def largest_step_inputs(resolved: ResolvedConfig) -> Iterator[StepInput]:
    """Yield the largest steps: all requests decode at their greatest length, beside as many prompt rows as a step may
    have, once with all sampling features that take memory and once with none; then the step in which the most prompts
    end.

    The page table is empty, so all KV goes to the sink page (page 0, which belongs to nobody), and a pool of one page
    is enough.
    """
    requests, max_rows = resolved.settings.max_running_requests, resolved.chunk_rows
    context_length = resolved.context_length
    max_decode_len = max(0, context_length - resolved.forced_shape.window)
    decodes = tuple(DecodeRequest(row, max_decode_len) for row in range(requests))
    lens = tuple((row, max_decode_len) for row in range(requests))

    def chunk(row: int, count: int, scored: int = 0) -> PromptChunk:
        start = max(0, context_length - count)
        return PromptChunk(row, start, start + count, True, (0,) * count, max(0, min(count, scored)))

    def chunks(scored: int) -> tuple[PromptChunk, ...]:
        first_rows = range(0, max_rows, context_length)
        return tuple(
            chunk(row, min(context_length, max_rows - first), scored - first) for row, first in enumerate(first_rows)
        )

    rows_per_prompt = max(1, max_rows // requests)
    finishing_chunks = tuple(
        chunk(row, rows_per_prompt) for row in range(max(1, min(requests, max_rows // rows_per_prompt)))
    )
    yield StepInput(decodes=decodes, chunks=chunks(SCORED_ROWS), lens=lens, mode=ALL_MODES)
    yield StepInput(decodes=decodes, chunks=chunks(0), lens=lens)
    yield StepInput(chunks=finishing_chunks, mode=SAMPLING_MODES)


def run_largest(lockstep: Lockstep, resolved: ResolvedConfig, table: PageTable) -> None:
    """Run the largest steps, before the first request; all ranks must call this."""
    steps = [(step_input, lockstep.any_tier) for step_input in largest_step_inputs(resolved)]
    if resolved.adaptive_trees:  # a draft that did not read the tokens of one step reads more rows in the next step
        steps += [(steps[1][0], TreeVote(0)), (steps[1][0], lockstep.any_tier)]
    for step_input, vote in steps:
        step = lockstep.run(step_input if lockstep.mesh.is_leader else StepInput(), 0, vote)
        if step.output is not None:
            lockstep.read(step)
    table.lens.zero_()
    lockstep.mesh.world.clock.take_collective_spans()


def refuse_out_of_memory(load: Callable[[], T], memory: DeviceMemory, description: str, remedy: str) -> T:
    """Return the result of `load`.

    Raises:
        ConfigError: `load` ran out of memory. The message says that `description` does not fit, and gives the `remedy`.
    """
    memory.reset_peak()
    try:
        return load()
    except OUT_OF_MEMORY as error:
        raise ConfigError(
            f"{description} do not fit the device of {memory.total_bytes / GB:.1f} GB ({error}); {remedy}"
        ) from None


def measure_memory(
    models: RankModels,
    mesh: Mesh,
    device: torch.device,
    memory: DeviceMemory,
    weights: int,
    build_lockstep: Callable[[RankModels, RankMemory], Lockstep],
) -> MemoryBreakdown:
    """Return how the memory of the devices is divided; see `memory_breakdown_of`. `weights` are the bytes of the
    models' weights. Steps are measured with pools of one page. `build_lockstep` makes the `Lockstep` that runs these
    steps.
    """
    resolved, sizes = models.resolved, models.pool_sizes
    graphs = device.type == "cuda" and captures_of(resolved.settings, device, models, mesh) is not None

    def measure_workspace(requests: int, rows: int) -> int:
        smaller_models = replace(models, resolved=resolved.with_limits(requests, rows))
        memory.reset_peak()
        trial_memory = allocate_pages(smaller_models, device, 1, Capacity(resolved.settings.page_size, "a trial"))
        run_largest(build_lockstep(smaller_models, trial_memory), smaller_models.resolved, trial_memory.cache.table)
        return memory.peak_bytes() - 2 * sizes.page_bytes  # without the page and the sink page

    def memory_breakdown(workspace: int) -> MemoryBreakdown:
        return MemoryBreakdown(memory.total_bytes, memory.free_bytes(), weights, workspace, workspace if graphs else 0)

    min_kv_bytes = sizes.bytes_of(resolved.shape.window) + 2 * sizes.page_bytes
    return memory_breakdown_of(resolved, mesh, min_kv_bytes, memory_breakdown, measure_workspace)


def memory_breakdown_of(
    resolved: ResolvedConfig,
    mesh: Mesh,
    min_kv_bytes: int,
    own_breakdown: Callable[[int], MemoryBreakdown],
    measure: Measure,
) -> MemoryBreakdown:
    """Return the `MemoryBreakdown` of the rank that has the least left for KV. All ranks must call this, and get the
    same result. `min_kv_bytes` are the bytes of the smallest KV cache. `own_breakdown` returns the breakdown of this
    rank, given its workspace (the bytes that the largest steps take). `measure` measures a workspace.

    Steps of half the size run first. The full steps run only if half of the size leaves enough for KV.

    Raises:
        ConfigError: less than the smallest KV cache is left; the message lists the whole breakdown, and which settings
            to lower to which values.
    """
    settings, requests, rows = resolved.settings, resolved.settings.max_running_requests, resolved.chunk_rows

    def smallest_breakdown(workspace: int) -> MemoryBreakdown:
        all_ranks = [MemoryBreakdown(*row) for row in mesh.all_gather_row(tuple(own_breakdown(workspace)))]
        return min(all_ranks, key=lambda breakdown: breakdown.kv_bytes)

    def breakdown_of_step(count: int, prompt_rows: int) -> MemoryBreakdown:
        try:
            return smallest_breakdown(measure(count, prompt_rows))
        except OUT_OF_MEMORY as error:
            if mesh.world.size > 1:  # peers wait in the middle of the step: there is no way to go on
                raise ConfigError(
                    f"a step of {count} requests and {prompt_rows} prompt rows does not fit beside the weights, which "
                    f"take {own_breakdown(0).weights / GB:.3f} GB ({error}); halve max_running_requests and "
                    "chunked_prefill_size"
                ) from None
        # A single rank is out of memory: count the step as the whole device.
        return smallest_breakdown(own_breakdown(0).total)

    half = breakdown_of_step(-(-requests // 2), -(-rows // 2))
    full = breakdown_of_step(requests, rows) if half.kv_bytes >= min_kv_bytes else half
    if full.kv_bytes >= min_kv_bytes:
        return full
    fitting_requests = _largest_fitting(lambda count: breakdown_of_step(count, rows).kv_bytes >= min_kv_bytes, requests)
    fitting_rows = _largest_fitting(lambda count: breakdown_of_step(requests, count).kv_bytes >= min_kv_bytes, rows)
    remedies = [f"max_running_requests (now {requests}) to {fitting_requests}"] if fitting_requests else []
    remedies += (
        [f"chunked_prefill_size (now {settings.chunked_prefill_size}) to {fitting_rows}"]
        if fitting_rows >= MIN_ADVISED_ROWS
        else []
    )
    if not remedies:
        remedies = ["context_length or the tree's size", "raise tp_size, to spread the model over more GPUs"]
    measured_steps = "half of the largest steps" if full is half else "the largest steps"
    raise ConfigError(
        f"no memory is left for a KV cache: {full.description}, for {measured_steps}, {requests} requests beside "
        f"{rows} prompt rows; the smallest KV cache takes {min_kv_bytes / GB:.3f} GB: lower {', or '.join(remedies)}"
    )


def _largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number below `limit` that fits, or 0. Try small numbers first: double from 1, then bisect."""
    low, high = 0, 1
    while high < limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def measure_largest_steps(lockstep: Lockstep, resolved: ResolvedConfig, memory: DeviceMemory, table: PageTable) -> int:
    """Run the largest steps on the finished engine, and return the bytes that they take.

    Raises:
        ConfigError: there is not enough memory for them.
    """
    try:
        run_largest(lockstep, resolved, table)  # allocates the buffers that are made once and kept
        memory.reset_peak()
        run_largest(lockstep, resolved, table)
    except OUT_OF_MEMORY as error:
        raise ConfigError(f"the largest steps do not fit beside the KV cache ({error}); lower {SMALLER_KV}") from None
    return memory.peak_bytes()


def leave_room_for_steps(step_bytes: int, capture: Callable[[], T], mesh: Mesh, memory: DeviceMemory) -> T:
    """Return the result of `capture`. The captured programs must leave `step_bytes` bytes free for the largest steps.

    Raises:
        ConfigError: the programs do not fit, or leave too little.
    """
    captured = refuse_out_of_memory(capture, memory, "captured programs", f"lower {SMALLER_KV}")
    missing_bytes = max(row[0] for row in mesh.all_gather_row((step_bytes - memory.free_bytes(),)))
    if missing_bytes > 0:
        raise ConfigError(
            f"captured programs have left {missing_bytes / GB:.3f} GB too little for the largest steps, which take "
            f"{step_bytes / GB:.3f} GB; lower {SMALLER_KV} by as much"
        )
    return captured
