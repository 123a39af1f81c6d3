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
from cluster.engine.captures import captures_of
from cluster.engine.lockstep import Lockstep
from cluster.engine.memory import RankMemory, allocate_pages
from cluster.engine.models import RankModels
from cluster.engine.prefill import SCORED_ROWS
from cluster.kv.budget import GB, Capacity, Needs
from cluster.kv.device_memory import OUT_OF_MEMORY, DeviceMemory
from cluster.kv.page_table import PageTable

DRAWS = SamplingMode.NOISY | SamplingMode.FILTERED | SamplingMode.LOGPROBS | SamplingMode.ADJUSTED
ALL = DRAWS | SamplingMode.CONSTRAINED | SamplingMode.TREES | SamplingMode.PROMPT_LOGPROBS
SMALLER_KV = "max_total_tokens, kv_cache_gb, mem_fraction_static or capture_sizes"
FEWEST_ROWS = 16  # the lowest chunked_prefill_size that an error advises
T = TypeVar("T")
Measure = Callable[[int, int], int]
"""A function of a number of requests and a number of prompt rows. It returns the bytes that the largest step with them
takes, or raises one of `OUT_OF_MEMORY`.
"""


def largest_orders(resolved: ResolvedConfig) -> Iterator[StepInput]:
    """Yield the largest steps: all requests decode at their greatest length, with a whole prompt chunk, once with all
    sampling features and once with none; then the step in which the most prompts end.

    The page table is empty, so all cells are in the sink page and a pool of one page is enough.
    """
    requests, rows, context_length = (
        resolved.settings.max_running_requests,
        resolved.longest_chunk,
        resolved.context_length,
    )
    longest = max(0, context_length - resolved.forced_shape.window)
    decodes = tuple(DecodeRequest(row, longest) for row in range(requests))
    lens = tuple((row, longest) for row in range(requests))

    def chunk(row: int, count: int, scored: int = 0) -> PromptChunk:
        start = max(0, context_length - count)
        return PromptChunk(row, start, start + count, True, (0,) * count, scored)

    each = max(1, rows // requests)
    ends = tuple(chunk(row, each) for row in range(max(1, min(requests, rows // each))))
    yield StepInput(decodes=decodes, chunks=(chunk(0, rows, min(rows, SCORED_ROWS)),), lens=lens, mode=ALL)
    yield StepInput(decodes=decodes, chunks=(chunk(0, rows),), lens=lens)
    yield StepInput(chunks=ends, mode=DRAWS)


def run_largest(lockstep: Lockstep, resolved: ResolvedConfig, table: PageTable) -> None:
    """Run the largest steps, before the first request; all ranks must call this."""
    for order in largest_orders(resolved):
        ran = lockstep.run(order if lockstep.mesh.leads else StepInput(), 0, resolved.shape.num_steps)
        if ran.output is not None:
            lockstep.read(ran)
    table.lens.zero_()
    lockstep.mesh.world.clock.split()


def fitting(load: Callable[[], T], memory: DeviceMemory, what: str, remedy: str) -> T:
    """Return the result of `load`.

    Raises:
        ConfigError: `load` ran out of memory. The message says that `what` does not fit, and gives the `remedy`.
    """
    memory.begin()
    try:
        return load()
    except OUT_OF_MEMORY as error:
        raise ConfigError(f"{what} do not fit the device of {memory.total / GB:.1f} GB ({error}); {remedy}") from None


def measured_needs(
    models: RankModels,
    mesh: Mesh,
    device: torch.device,
    memory: DeviceMemory,
    weights: int,
    trial: Callable[[RankModels, RankMemory], Lockstep],
) -> Needs:
    """Return `needs_of` the models, measured with pools of one page. `trial` makes the `Lockstep` that runs the
    measured steps.
    """
    resolved = models.resolved
    page_bytes = resolved.settings.page_size * models.token_bytes
    graphs = device.type == "cuda" and captures_of(resolved.settings, device, models, mesh) is not None

    def measure(requests: int, rows: int) -> int:
        own = replace(models, resolved=resolved.smaller(requests, rows))
        memory.begin()
        pools = allocate_pages(own, device, 1, Capacity(resolved.settings.page_size, "a trial"))
        run_largest(trial(own, pools), own.resolved, pools.cache.table)
        return memory.taken() - 2 * page_bytes  # without the page and the sink page

    def needs(workspace: int) -> Needs:
        return Needs(memory.total, memory.free(), weights, workspace, workspace if graphs else 0)

    least = resolved.shape.window * models.token_bytes + 2 * page_bytes
    return needs_of(resolved, mesh, least, needs, measure)


def needs_of(resolved: ResolvedConfig, mesh: Mesh, least: int, own: Callable[[int], Needs], measure: Measure) -> Needs:
    """Return the `Needs` of the rank that has the least left for KV. All ranks must call this, and get the same result.
    `least` are the bytes of the smallest KV cache. `own` returns the needs of this rank with a given workspace.

    Steps of half the size run first. The full steps run only if half of the size leaves enough for KV.

    Raises:
        ConfigError: less than the smallest KV cache is left; the message lists all needs, and which settings to lower
            to which values.
    """
    settings, requests, rows = resolved.settings, resolved.settings.max_running_requests, resolved.longest_chunk

    def needs(workspace: int) -> Needs:
        all_ranks = [Needs(*row) for row in mesh.all_gather_row(tuple(own(workspace)))]
        return min(all_ranks, key=lambda one: one.left)

    def tried(count: int, beside: int) -> Needs:
        try:
            return needs(measure(count, beside))
        except OUT_OF_MEMORY as error:
            if mesh.world.size > 1:  # peers wait in the middle of the step: there is no way to go on
                raise ConfigError(
                    f"a step of {count} requests and {beside} prompt rows does not fit beside the weights, which take "
                    f"{own(0).weights / GB:.3f} GB ({error}); halve max_running_requests and chunked_prefill_size"
                ) from None
        return needs(own(0).total)  # a rank alone is out of memory: count the step as the whole device

    half = tried(-(-requests // 2), -(-rows // 2))
    found = tried(requests, rows) if half.left >= least else half
    if found.left >= least:
        return found
    fewer = _most(lambda count: tried(count, rows).left >= least, requests)
    shorter = _most(lambda count: tried(requests, count).left >= least, rows)
    remedies = [f"max_running_requests (now {requests}) to {fewer}"] if fewer else []
    remedies += (
        [f"chunked_prefill_size (now {settings.chunked_prefill_size}) to {shorter}"] if shorter >= FEWEST_ROWS else []
    )
    if not remedies:
        remedies = ["context_length or the tree's size", "raise tp_size, to spread the model over more GPUs"]
    of = "half of the largest steps" if found is half else "the largest steps"
    raise ConfigError(
        f"no memory is left for a KV cache: {found.about}, for {of}, {requests} requests beside {rows} prompt rows; "
        f"the smallest KV cache takes {least / GB:.3f} GB: lower {', or '.join(remedies)}"
    )


def _most(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number below `most` that fits, or 0. Doubles from 1, then bisects: small steps run first."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, 2 * high
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def rehearsed(lockstep: Lockstep, resolved: ResolvedConfig, memory: DeviceMemory, table: PageTable) -> int:
    """Run the largest steps on the finished engine, and return the bytes that they take.

    Raises:
        ConfigError: there is not enough memory for them.
    """
    try:
        run_largest(lockstep, resolved, table)  # allocates the buffers that are made once and kept
        memory.begin()
        run_largest(lockstep, resolved, table)
    except OUT_OF_MEMORY as error:
        raise ConfigError(f"the largest steps do not fit beside the KV cache ({error}); lower {SMALLER_KV}") from None
    return memory.taken()


def beside(taken: int, capture: Callable[[], T], mesh: Mesh, memory: DeviceMemory) -> T:
    """Return the result of `capture`. The captured programs must leave `taken` bytes free for the largest steps.

    Raises:
        ConfigError: the programs do not fit, or leave too little.
    """
    captured = fitting(capture, memory, "captured programs", f"lower {SMALLER_KV}")
    lacks = max(row[0] for row in mesh.all_gather_row((taken - memory.free(),)))
    if lacks > 0:
        raise ConfigError(
            f"captured programs have left {lacks / GB:.3f} GB too little for the largest steps, which take "
            f"{taken / GB:.3f} GB; lower {SMALLER_KV} by as much"
        )
    return captured
