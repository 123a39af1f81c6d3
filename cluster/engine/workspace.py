"""What steps take of a device's memory beside weights and KV caches: measured, with the largest that settings allow.

A KV cache is sized by what is left. Nothing is sized on a CPU by this: memory there is the machine's.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from cluster.batch import Decode, Mode, Order, PromptChunk
from cluster.config import ConfigError, EngineConfig
from cluster.engine.captures import captures_of
from cluster.engine.lockstep import Lockstep
from cluster.engine.memory import RankMemory, allocate_pages
from cluster.engine.models import RankModels
from cluster.kv.budget import GB, Capacity, Needs
from cluster.kv.device_memory import OUT_OF_MEMORY, DeviceMemory
from cluster.mesh import Mesh

ALL = Mode.NOISY | Mode.FILTERED | Mode.LOGPROBS | Mode.ADJUSTED | Mode.TREES
MOST_SCORED = 512  # prompt rows of a step whose log-probabilities are asked for
FEWEST_ROWS = 16  # of prompts, that a refusal advises
T = TypeVar("T")
Measure = Callable[[int, int], int]
"""The bytes that the largest step takes of so many requests and prompt rows."""


def prompt_rows(config: EngineConfig, context_length: int) -> int:
    """The most prompt rows of one step."""
    return min(config.chunked_prefill_size, context_length) if config.chunked_prefill_size > 0 else context_length


def largest_orders(config: EngineConfig, context_length: int, window: int, idle_row: int) -> Iterator[Order]:
    """Steps that no step of a server exceeds: all requests decode beside a whole chunk, as long as they may be; or all
    prompts end at once; in modes that do all that requests may ask for, and in the plainest.

    All rows are those of idle requests: their cells are in the sink page, so there need not be any other.
    """
    requests, rows = config.max_running_requests, prompt_rows(config, context_length)
    longest = max(0, context_length - window)
    decodes = (Decode(idle_row, longest),) * requests

    def chunk(count: int, scored: int = 0) -> PromptChunk:
        start = max(0, context_length - count)
        return PromptChunk(idle_row, start, start + count, True, (0,) * count, scored)

    each = max(1, rows // requests)
    ends = (chunk(each),) * max(1, min(requests, rows // each))
    for mode in (ALL, Mode(0)):
        yield Order(decodes=decodes, chunks=(chunk(rows),), mode=mode)
        yield Order(chunks=ends, mode=mode)
    yield Order(decodes=decodes, mode=ALL | Mode.CONSTRAINED)
    scored = min(rows, MOST_SCORED)
    yield Order(chunks=(chunk(rows, scored),), mode=Mode.PROMPT_LOGPROBS)


def run_largest(lockstep: Lockstep, config: EngineConfig, context_length: int) -> None:
    """Run the largest steps; all ranks must call this."""
    idle, deepest = lockstep.programs.assembler.idle_row, len(lockstep.shapes) - 1
    for order in largest_orders(config, context_length, lockstep.shapes[-1].window, idle):
        ran = lockstep.run(order if lockstep.mesh.leads else Order(), 0, deepest)
        if ran.output is not None:
            lockstep.read(ran)
    lockstep.mesh.world.clock.split()


def fitting(load: Callable[[], T], memory: DeviceMemory) -> T:
    """What `load` returns; `memory.taken` then is what the weights take.

    Raises:
        ConfigError: they do not fit.
    """
    memory.begin()
    try:
        return load()
    except OUT_OF_MEMORY as error:
        raise ConfigError(
            f"the weights do not fit the device of {memory.total / GB:.1f} GB ({error}); raise tp_size, or serve a "
            "quantised checkpoint"
        ) from None


def measured_needs(
    models: RankModels,
    mesh: Mesh,
    device: torch.device,
    context_length: int,
    memory: DeviceMemory,
    trial: Callable[[RankModels, RankMemory], Lockstep],
) -> Needs:
    """See `needs_of`; called right after `fitting` has loaded the models. `trial` makes what runs steps with them and
    pools of one page.
    """
    weights, resolved = memory.taken(), models.resolved
    least = (resolved.shape.window + 2 * resolved.config.page_size) * models.token_bytes
    graphs = device.type == "cuda" and captures_of(resolved.config, device, models) is not None

    def measure(requests: int, rows: int) -> int:
        sizes = {"max_running_requests": requests, "chunked_prefill_size": rows}
        config = resolved.config.model_copy(update=sizes)
        own = replace(models, resolved=replace(resolved, config=config))
        memory.begin()
        try:
            pools = allocate_pages(own, device, context_length, 1, Capacity(config.page_size, "a trial"))
            run_largest(trial(own, pools), config, context_length)
        except OUT_OF_MEMORY as error:
            raise ConfigError(
                f"a step of {requests} requests and {rows} prompt rows does not fit beside the weights, which take "
                f"{weights / GB:.3f} GB ({error}); lower max_running_requests or chunked_prefill_size"
            ) from None
        return memory.taken() - 2 * config.page_size * own.token_bytes

    return needs_of(resolved.config, context_length, mesh, memory, weights, least, graphs, measure)


def needs_of(
    config: EngineConfig,
    context_length: int,
    mesh: Mesh,
    memory: DeviceMemory,
    weights: int,
    least: int,
    graphs: bool,
    measure: Measure,
) -> Needs:
    """What there is and what is needed on the rank that has the least left for KV; the same on every rank, which all
    must call this. `least` are the bytes of the smallest KV cache, `graphs` says whether steps will be captured.

    Half of the largest step is run before the whole one, which is not run if it cannot fit.

    Raises:
        ConfigError: not even the smallest KV cache is left; it says what is taken by what, and which settings to lower
            and to what.
    """
    requests, rows = config.max_running_requests, prompt_rows(config, context_length)

    def needs(workspace: int) -> Needs:
        own = Needs(memory.total, memory.free(), weights, workspace, workspace if graphs else 0)
        all_ranks = [Needs(*row) for row in mesh.all_gather_row(tuple(own))]
        return min(all_ranks, key=lambda one: one.left)

    def fits(count: int, beside: int) -> bool:
        return needs(measure(count, beside)).left >= least

    quarter = measure(-(-requests // 4), -(-rows // 4))
    half = measure(-(-requests // 2), -(-rows // 2))
    ahead = needs(max(half, 3 * half - 2 * quarter))
    found = needs(measure(requests, rows)) if ahead.left > 0 else ahead
    if found.left >= least:
        return found
    fewer = _most(lambda count: fits(count, rows), requests)
    shorter = _most(lambda count: fits(requests, count), rows)
    remedies = [f"max_running_requests (now {requests}) to {fewer}"] if fewer else []
    remedies += [f"chunked_prefill_size (now {config.chunked_prefill_size}) to {shorter}"] if shorter >= FEWEST_ROWS else []
    if not remedies:
        remedies = ["context_length or the tree", "or spread the model over more GPUs with a higher tp_size"]
    raise ConfigError(
        f"no memory is left for a KV cache: {found.about}, for steps of {requests} requests and {rows} prompt rows; "
        f"the smallest KV cache takes {least / GB:.3f} GB: lower {', or '.join(remedies)}"
    )


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number below `most` that fits, by halving; 0: not even 1. Small ones are tried before large ones."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, 2 * high
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def check_left(
    lockstep: Lockstep, config: EngineConfig, context_length: int, memory: DeviceMemory, captured: str
) -> Callable[[], None]:
    """Run the largest steps on the finished engine, so that the allocator has what they take; returns what checks, once
    programs are captured, that as much is still left.

    Raises:
        ConfigError: there is not enough for them.
    """
    tokens = f"max_total_tokens, kv_cache_gb or mem_fraction_static, or {captured}"
    memory.begin()
    try:
        run_largest(lockstep, config, context_length)
    except OUT_OF_MEMORY as error:
        raise ConfigError(f"the largest steps do not fit beside the KV cache ({error}); lower {tokens}") from None
    taken = memory.taken()

    def check() -> None:
        lacks = max(row[0] for row in lockstep.mesh.all_gather_row((taken - memory.left(),)))
        if lacks > 0:
            raise ConfigError(
                f"captured programs have left {lacks / GB:.3f} GB too little for the largest steps, which take "
                f"{taken / GB:.3f} GB; lower {tokens} by as much"
            )

    return check
