"""Builds the engine of one rank: loads the models, allocates memory, assembles the step, measures step times."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cluster.arch.hub import fetch, name_of
from cluster.arch.resolve import ResolvedConfig, check_models, resolve_models
from cluster.config import ConfigError, EngineConfig
from cluster.config.resolved import tokenizer_folder
from cluster.device.timing import timer_of
from cluster.distributed.mesh import Mesh, Rendezvous, Store, join
from cluster.distributed.watchdog import DeviceWatchdog
from cluster.dp_attention.coordinator import Coordinator
from cluster.dp_attention.plan import PlanRule
from cluster.dp_attention.tree_times import TreeCosts
from cluster.engine.assembler import Assembler
from cluster.engine.backends import bitmask_of, sampler_of, tree_backend_of
from cluster.engine.calibrate import measure_pace
from cluster.engine.captures import Captures, capture_decoding, captures_of
from cluster.engine.draft_sample import check_sample
from cluster.engine.drafts import create_draft, create_lookup
from cluster.engine.engine import Engine, EngineParts, Rank
from cluster.engine.grammars import LazyMatchers
from cluster.engine.host_memory import cache_freed_memory
from cluster.engine.lockstep import Lockstep
from cluster.engine.memory import RankMemory, allocate
from cluster.engine.models import RankModels, device_facts, kernels_of, load_models
from cluster.engine.one_shot_setting import check_one_shot_setting, enable_one_shot
from cluster.engine.programs import Programs
from cluster.engine.rank_agreement import check_rank_agreement
from cluster.engine.rank_info import rank_info
from cluster.engine.scheduler import Scheduler
from cluster.engine.step_loop import StepLoop
from cluster.engine.tree_calibration import measure_trees, tree_costs
from cluster.engine.tree_outlook import TreeOutlook
from cluster.engine.workspace import (
    SMALLER_KV,
    leave_room_for_steps,
    measure_largest_steps,
    measure_memory,
    refuse_out_of_memory,
)
from cluster.kv.device_memory import DeviceMemory, memory_of
from cluster.kv.pool import SlotMemory
from cluster.models.runner import DraftRunner, TargetRunner
from cluster.observability.metrics import EngineMetrics
from cluster.observability.step_times import StepTimes
from cluster.sampling.grammars import GrammarTable
from cluster.sampling.logits_processor import LogitsTables
from cluster.sampling.parameters import SamplingTable
from cluster.sampling.penalties import PenaltyTable
from cluster.spec.draft import Draft
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.multilayer import MultiLayerDraft
from cluster.spec.ngram import NgramDraft
from cluster.spec.resting import RestingDraft
from cluster.spec.step import RequestTables, Step
from cluster.spec.synthetic import SyntheticAccept
from cluster.status import CaptureInfo
from cluster.tokenizer.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

# In a padded step, all groups run as many rows as the largest group. With dp_padding auto, a step on GPUs is padded if
# at most this share of its rows is then padding.
MAX_GPU_PADDING = 0.5


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The parts from which an engine is assembled. On a device with memory of its own (`device_memory` is not None),
    `weights` is the number of bytes that the models take there; otherwise it is 0.
    """

    mesh: Mesh
    device: torch.device
    models: RankModels
    memory: RankMemory
    device_memory: DeviceMemory | None = None
    weights: int = 0

    @property
    def resolved(self) -> ResolvedConfig:
        """The facts that follow from settings, checkpoints and device."""
        return self.models.resolved

    def draft(self) -> Draft:
        """Return the draft that the settings and checkpoints ask for."""
        return create_draft(self.models, self.memory, self.device)


def build_engine(config: EngineConfig) -> Engine:
    """Return the engine of `config` as a gang of one rank, ready to step.

    Raises:
        ConfigError: something cannot run as configured; the message names the setting and the remedy.
    """
    prepared = prepare_single_rank(config)
    return engine_of(prepared, prepared.draft())


def prepare_single_rank(config: EngineConfig, memory: DeviceMemory | None = None) -> EnginePlan:
    """Load the models and allocate the memory of a gang of one rank. The caller then passes the result to `engine_of`,
    with the draft of its choice. `memory` stands for the memory of the device; if it is None, the device itself is
    asked. Models on a hub are downloaded, but only if their configs and headers show that they can be served.

    Raises:
        ConfigError: as `build_engine`.
    """
    if (ranks := config.tp_size) > 1:
        raise ConfigError(f"tp_size {ranks} needs {ranks} processes, and this is one; leave it out, or use aerie serve")
    device = _select_device(config)
    check_one_shot_setting(config, device)
    return prepare(resolve_models(fetch(config), *device_facts(config, device)), Mesh(), device, memory)


def engine_of(prepared: EnginePlan, draft: Draft) -> Engine:
    """Return the engine of a gang of one rank that drafts with `draft`.

    Raises:
        ConfigError: as `build_engine`.
    """
    engine = assemble(prepared, draft)
    assert isinstance(engine, Engine), "a single rank is the leader"
    return engine


def build_rank(config: EngineConfig, rank: int, rendezvous: Rendezvous | None, store: Store | None = None) -> Rank:
    """Return rank `rank` of the gang that meets at `rendezvous`, ready to step with its peers. If `rendezvous` is None,
    the gang has one rank only. Rank 0 passes the `store` that it opened, other ranks pass None. Models on a hub are
    read from this node's cache; if they are missing there, they are downloaded into it first.

    Raises:
        ConfigError: something cannot run as configured, or ranks are configured differently.
        PeerLostError: a rank did not join.
    """
    if rendezvous is None:
        return build_engine(config)
    device = _select_device(config)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    check_one_shot_setting(config, device)
    config = fetch(config)
    resolved = check_models(config, *device_facts(config, device))
    mesh = join(rank, config.tp_size, config.attn_dp_size, rendezvous, device, store)
    enable_one_shot(config, mesh, device)
    prepared = prepare(resolved, mesh, device)
    return assemble(prepared, prepared.draft())


def prepare(
    resolved: ResolvedConfig, mesh: Mesh, device: torch.device, memory: DeviceMemory | None = None
) -> EnginePlan:
    """Load the models of one rank and allocate its memory. All ranks must call this: they check that they agree on the
    settings, and allocate KV caches of the same size.

    Raises:
        ConfigError: something cannot run as configured, or ranks are configured differently.
    """
    kernels = kernels_of(resolved, device)
    check_rank_agreement(resolved, kernels, mesh)
    _configure_host(resolved.settings, device)
    _warn_of_context(resolved)
    max_position = resolved.context_length + resolved.max_positions_ahead
    memory = memory_of(device) if memory is None else memory
    if memory is None:
        models, weights = load_models(resolved, mesh, device, kernels, max_position), 0
    else:
        remedy, free_before = "raise tp_size, or serve a quantised checkpoint", memory.free_bytes()
        models = refuse_out_of_memory(
            lambda: load_models(resolved, mesh, device, kernels, max_position), memory, "the weights", remedy
        )
        weights = max(0, free_before - memory.free_bytes())  # other processes may have freed memory meanwhile
    rank_memory = allocate_memory(models, mesh, device, memory, weights)
    return EnginePlan(mesh, device, models, rank_memory, memory, weights)


def allocate_memory(
    models: RankModels, mesh: Mesh, device: torch.device, memory: DeviceMemory | None, weights: int
) -> RankMemory:
    """Allocate the memory of a rank besides its models, which take `weights` bytes. On a device with memory of its own,
    KV caches get the memory that weights and the largest steps leave. `measure_memory` runs such steps to find out how
    much memory they take.

    Raises:
        ConfigError: something does not fit; the message says what to lower.
    """
    if memory is None:
        return allocate(models, mesh, device)

    def build_lockstep(models: RankModels, trial_memory: RankMemory) -> Lockstep:
        prepared = EnginePlan(mesh, device, models, trial_memory)
        return _lockstep(prepared, prepared.draft(), captures_of(models.resolved.settings, device, models, mesh))

    breakdown = measure_memory(models, mesh, device, memory, weights, build_lockstep)
    remedy = f"lower {SMALLER_KV}"
    return refuse_out_of_memory(lambda: allocate(models, mesh, device, breakdown), memory, "KV caches", remedy)


def assemble(prepared: EnginePlan, draft: Draft) -> Rank:
    """Return the engine of one rank on its mesh: an `Engine` if the rank leads its attention group, otherwise a
    `StepLoop`.

    Raises:
        ConfigError: the draft's output differs from the one recorded in its folder (`draft_sample.json`), or something
            else cannot run as configured.
    """
    mesh, memory, resolved = prepared.mesh, prepared.memory, prepared.resolved
    config = resolved.settings
    captures = captures_of(config, prepared.device, prepared.models, mesh)
    chunk_sizes = () if captures is None else captures.buckets.chunk_sizes
    lockstep = _lockstep(prepared, draft, captures)
    if memory.draft_runner_list:
        check_sample(resolved, lockstep, memory.cache)
    device_memory, step_bytes = prepared.device_memory, 0
    if device_memory is not None:
        step_bytes = measure_largest_steps(lockstep, resolved, device_memory, memory.cache.table)

    def capture_and_measure() -> tuple[CaptureInfo | None, StepTimes | None, TreeCosts | None]:
        """Capture programs, and then measure how long steps take: captured steps are faster than eager ones."""
        return (
            None if captures is None else capture_decoding(lockstep, resolved, captures.buckets),
            measure_pace(lockstep, memory.cache, resolved) if resolved.prefill_time_limited else None,
            measure_trees(lockstep, memory.cache, resolved) if resolved.adaptive_trees else None,
        )

    if captures is None or device_memory is None:
        captured, pace, costs = capture_and_measure()
    else:
        captured, pace, costs = leave_room_for_steps(step_bytes, capture_and_measure, mesh, device_memory)
    memory.forward_spans.take()  # drop the forward times of the steps so far
    lockstep.watchdog.start_serving(config.watchdog_timeout_s)
    if costs is not None:
        lockstep.coordinator.use_costs(costs, lockstep.programs.has_program)
    name = name_of(config.model_path) or "model"
    trees = [shape.label for shape in resolved.tiers]
    metrics = EngineMetrics(model_name=name, rank=mesh.rank, depths=resolved.forced_shape.num_steps, trees=trees)
    info = rank_info(prepared.models, memory, mesh, pace, captured)
    if costs is not None:
        info = replace(info, tree_costs=tree_costs(costs, resolved))
    logger.info("rank %d: computes in %s; kernels in %s", mesh.rank, info.dtype, info.kernels)
    for line in info.attention:
        logger.info("rank %d: attention of the %s", mesh.rank, line)
    for warning in info.draft.doubts if info.draft is not None and mesh.rank == 0 else ():
        logger.warning("draft %s: %s", config.speculative_draft_model_path, warning)
    kv_log_values = mesh.rank, info.kv_tokens, info.kv_cache_dtype, info.kv_bytes_per_token, info.kv_sized_by
    logger.info("rank %d: KV cache of %d tokens in %s, %d bytes a token (%s)", *kv_log_values)
    if info.kv_window_tokens:
        window_log_values = mesh.rank, info.kv_window_tokens, info.kv_window_bytes_per_token
        logger.info("rank %d: layers with a sliding window keep %d tokens, %d bytes a token", *window_log_values)
    loop = StepLoop(lockstep, metrics, info, memory.forward_spans)
    if not mesh.is_leader:
        return loop
    scheduler = Scheduler(resolved, memory.cache, resolved.shape.window, pace, chunk_sizes)
    if (times := lockstep.coordinator.tree_times) is not None:
        scheduler.decode.outlook = TreeOutlook(
            resolved.tiers, config.max_running_requests, times, mesh.attn_dp, lockstep.programs.price_us
        )
    return Engine(
        EngineParts(
            resolved=resolved,
            cache=memory.cache,
            scheduler=scheduler,
            loop=loop,
            tokenizer=_tokenizer(config),
        )
    )


def _lockstep(prepared: EnginePlan, draft: Draft, captures: Captures | None) -> Lockstep:
    """Return the `Lockstep` of this rank, with its step, the tables of requests, the coordinator and the exchange."""
    mesh, device, models, memory = prepared.mesh, prepared.device, prepared.models, prepared.memory
    resolved, config, dtype = models.resolved, models.resolved.settings, models.dtype
    rows = config.max_running_requests + 1  # the last row is that of idle requests (padding)
    draft_inputs = EagleDraftInput.create_idle_input(resolved.draft, resolved.shape.topk, dtype, device, rows)
    runners: list[TargetRunner | DraftRunner] = [memory.target_runner, *memory.draft_runner_list]
    slot_memories: list[SlotMemory] = [pool for runner in runners for pool in runner.pools.other_pools]
    window_pools = [pool for runner in runners for pool in runner.pools.window_pools]
    if isinstance(draft, MultiLayerDraft):
        slot_memories.append(draft)
    buckets = None if captures is None else captures.buckets
    target, kernels = resolved.target, models.kernels
    vocab, buffer_sets = target.vocab_size, 1 if kernels.flashinfer is None else 2
    matcher_factory = LazyMatchers(tokenizer_folder(config), vocab, target.eos_token_ids)
    grammars = GrammarTable(vocab, matcher_factory, bitmask_of(kernels))
    logits_tables = LogitsTables(PenaltyTable(rows, vocab, dtype, device), grammars)
    lookup = create_lookup(models, device)
    history = draft.history if isinstance(draft, NgramDraft) else None if lookup is None else lookup.history
    sampling = SamplingTable(rows, dtype, device)
    tables = RequestTables(memory.cache.table, sampling, logits_tables, draft_inputs, history, lookup)
    max_padding, expert_parallel = MAX_GPU_PADDING if resolved.device == "cuda" else 0.0, config.ep_size > 1
    trees = tree_backend_of(kernels)
    if config.synthetic_acceptance:
        logger.warning("synthetic_acceptance is set, for load tests only: the output is not that of the model")
        trees = trees._replace(accept=SyntheticAccept(config.synthetic_acceptance, device))
    step = Step(memory.target_runner, draft, tables, mesh.enter, sampler_of(kernels), trees)
    rule = PlanRule(
        mesh.attn.size,
        config.dp_padding,
        max_padding,
        buckets,
        resolved.forced_rows,
        expert_parallel,
        draft_rests=isinstance(draft, RestingDraft),
        last_drafted_tier=resolved.last_drafted_tier,
    )
    return Lockstep(
        mesh=mesh,
        coordinator=Coordinator(mesh, rule, resolved.tiers, *models.ops),
        exchange=models.exchange,
        programs=Programs(
            Assembler(tables, resolved, slot_memories, runners, buffer_sets, window_pools),
            step,
            models.exchange,
            mesh.world.clock,
            None if captures is None else captures.capture,
        ),
        tree_shapes=resolved.tiers,
        watchdog=DeviceWatchdog(mesh, timer_of(device)),
        max_in_flight=resolved.steps_ahead,
        debug=config.debug_lockstep,
    )


def _select_device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"device is cuda but torch {torch.__version__} sees no CUDA device (CUDA_VISIBLE_DEVICES is "
            f"{visible_devices or 'not set'}); install a CUDA build of torch, or set device to cpu"
        )
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def _configure_host(config: EngineConfig, device: torch.device) -> None:
    if device.type == "cpu":
        cache_freed_memory()
        torch.set_num_threads(config.num_threads or max(1, (os.cpu_count() or 1) // config.tp_size))


def _warn_of_context(resolved: ResolvedConfig) -> None:
    """Warn of a `context_length` beyond what the target's config promises."""
    if resolved.context_length > (max_position := resolved.target.max_position):
        logger.warning(
            "context_length %d is beyond the %d tokens that the target's config promises (max_position_embeddings, "
            "stretched by its rope scaling); it is served as set, and texts beyond %d may be poor",
            resolved.context_length,
            max_position,
            max_position,
        )


def _tokenizer(config: EngineConfig) -> TextTokenizer | None:
    folder = tokenizer_folder(config)
    if config.tokenizer_path is None and not (Path(folder) / "tokenizer.json").is_file():
        return None
    return TextTokenizer.load(folder)
