"""`aerie bench roofline`: the time of each phase of a step, against the least possible time on this machine.

A forward's least time is the longer of two: the time to read its data, and the time of its operations (`demand`), at
rates measured in the same run (`ceilings`). A phase's least time is the sum over its forwards. Eager steps are measured
phase by phase, captured steps as one phase. The model is any folder, or random with the shape of a real one. The accept
length is that of the draft, or synthetic. From Python, call `measure(ModelPair(target, draft), Size(..))`.

A random model's weights are generated on the device. If `random_contexts` is set, the contexts' K and V are random too:
the prefix cache then has the prompts from the start, and only the last tokens of prompts are computed.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cluster.arch.resolve import ResolvedConfig
from cluster.bench.ceilings import Ceilings, measure_ceilings
from cluster.bench.demand import Demand, least_seconds, step_demand
from cluster.bench.goals import Goal
from cluster.bench.loaded import LoadedModels, WrapDraft
from cluster.bench.oracle_draft import CountingTokens, ExpectedTokens, OracleDraft, RecordedTokens
from cluster.bench.pair import PLAIN, ModelPair, TreeChoice, short_path
from cluster.bench.random_models import random_model, random_prompts
from cluster.bench.report import LogProgress, columns_table, machine_info, mean, median, ratio
from cluster.bench.runs import fixed_length_params
from cluster.bench.steady import WARMUP_STEPS, NotSteadyError, SteadySteps, run_steady_steps
from cluster.config import ConfigError, EngineConfig
from cluster.observability.step_stats import DEVICE_PHASES, REPLAY
from cluster.request import Request
from cluster.spec.draft import Draft

CHUNK_ROWS = 2048  # most prompt rows of a step; prompts run before the steady steps
SAMPLE_TOKENS = 256  # context length for the check of a draft at its load, against the sample in its folder
MAX_UNCACHED_TOKENS = 64  # most tokens of a prompt that are computed if its full pages are in the prefix cache
GOAL_BATCH, GOAL_CONTEXT = 8, 256  # the least batch with goals, and the longest context with a goal for the share
# Goals for the share of the possible speed: the first for plain decoding and chains, the second for other trees.
GOAL_CHAIN, GOAL_TREE = 0.70, 0.65
MIN_CAPTURE_SPEEDUP = 0.98  # least speed of captured steps over eager steps; a lower ratio is more than noise


@dataclass(frozen=True, slots=True)
class Size:
    """What to measure: each of `trees` with each batch size and each context length, for `steps` steady steps.

    `accept_length` is the synthetic accept length, limited by the depth of a tree; if None, the draft's own tokens
    count. `shape` is a preset of `random_models`, measured instead of folders, with `layers` layers; if `layers` is
    None, with all that fit. `captured`: which steps to measure, eager (False) or captured (True). `random_contexts`:
    the K and V of a `shape`'s contexts are random, not computed. `padded`: programs are captured at start for the batch
    sizes `batches`, and captured steps are padded to these.
    """

    trees: tuple[TreeChoice, ...] = (PLAIN, TreeChoice(3), TreeChoice(5, 8, 32))
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024)
    steps: int = 24
    accept_length: float | None = None
    shape: str | None = None
    layers: int | None = None
    captured: tuple[bool, ...] = (False, True)
    random_contexts: bool = False
    padded: bool = False


QUICK = Size(batches=(1, 8), contexts=(64,), steps=6)


@dataclass(frozen=True, slots=True)
class Subject:
    """The measured folders. For a random model, also its preset `shape`, its number of `layers`, and the preset's
    number of layers.
    """

    pair: ModelPair
    shape: str | None = None
    layers: int = 0
    preset_layers: int = 0


class MeasuredSteps(NamedTuple):
    """Steady steps of one tree at one batch size, and the resolved models that ran them."""

    tree: TreeChoice
    batch: int
    captured: bool
    steps: SteadySteps
    models: ResolvedConfig


class Workload(NamedTuple):
    """The requests by context length, and the correct continuations (None if the draft's own tokens count)."""

    requests: dict[int, list[Request]]
    expected: ExpectedTokens | None


OnFigure = Callable[[dict[str, Any]], None]
"""A callback that gets every figure as soon as it is measured. The figure's share of the possible speed follows from
the rates measured at the start; the final result uses the higher of the rates at the start and at the end.
"""


def measure(
    pair: ModelPair, size: Size, log_progress: LogProgress = print, on_figure: OnFigure = lambda row: None
) -> dict[str, Any]:
    """Measure all trees, batches and contexts; return the figures, JSON-ready.

    Raises:
        ConfigError: the shape is unknown, no tree can have the accept length, `layers` or `random_contexts` is set
            without a shape, or an engine without capture cannot be built.
        NotSteadyError: an engine without capture gave too few steps.
    """
    trees = size.trees if pair.draft or size.shape else (PLAIN,)
    deepest = max(tree.num_steps for tree in trees)
    if size.accept_length is not None and not 1 <= size.accept_length <= deepest + 1:
        raise ConfigError(f"accept_length {size.accept_length:g} is not within 1 and {deepest + 1}, the deepest tree's")
    if size.layers is not None and size.shape is None:
        raise ConfigError("layers belong to a random model; set shape as well")
    if size.random_contexts and size.shape is None:
        raise ConfigError("random_contexts belong to a random model; set shape as well")
    with subject_of(pair, size, log_progress) as subject:
        return _measure_subject(subject, replace(size, trees=trees), log_progress, on_figure)


def _measure_subject(subject: Subject, size: Size, log_progress: LogProgress, on_figure: OnFigure) -> dict[str, Any]:
    deepest_tree = max(size.trees, key=lambda tree: (tree.num_steps, tree.nodes))
    loaded = LoadedModels(engine_config(subject.pair, deepest_tree, size))
    initial_ceilings = measure_ceilings(device=loaded.device, dtype=loaded.dtype)
    log_progress(
        f"roofline: {initial_ceilings.bytes_per_s / 1e9:.1f} GB/s read, "
        f"{initial_ceilings.flops_per_s / 1e9:.0f} GFLOP/s"
    )
    requests = _make_requests(subject, loaded, size)
    work = Workload(requests, None if size.accept_length is None else _expected_tokens(subject, loaded, requests, size))
    measurements: list[MeasuredSteps] = []
    skipped: dict[str, str] = {}
    for tree in size.trees:
        for captured in size.captured:
            log_progress(f"roofline: {tree}, {'captured' if captured else 'eager'}")
            for measurement in _measure_engine(loaded, subject.pair, size, work, (tree, captured), skipped):
                measurements.append(measurement)
                for figure in figure_rows(measurement, loaded.dtype.itemsize, initial_ceilings):
                    on_figure(figure)
            gc.collect()  # otherwise this engine's KV cache would still use memory when the next one is allocated
    ceilings = initial_ceilings.highest(measure_ceilings(device=loaded.device, dtype=loaded.dtype))
    figures = [
        figure for measurement in measurements for figure in figure_rows(measurement, loaded.dtype.itemsize, ceilings)
    ]
    return {
        "what": "roofline",
        "machine": machine_info(),
        "device": torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "cpu",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kernels": loaded.kernels_description,
        "quantised": list(loaded.quantised_descriptions),
        "target": subject.shape or short_path(subject.pair.target),
        "layers": [subject.layers, subject.preset_layers] if subject.shape else None,
        "gigabytes_s": ceilings.bytes_per_s / 1e9,
        "gigaflops": ceilings.flops_per_s / 1e9,
        "steps": size.steps,
        "asked_accept_length": size.accept_length,
        "skipped": skipped,
        "figures": figures,
    }


def _measure_engine(
    loaded: LoadedModels,
    pair: ModelPair,
    size: Size,
    work: Workload,
    variant: tuple[TreeChoice, bool],
    skipped: dict[str, str],
) -> Iterator[MeasuredSteps]:
    """Yield the steady steps of one engine at every context and batch. `variant` is the engine's tree, and whether the
    engine captures steps. Steps that cannot be captured are left out, and the reason goes to `skipped`.

    Raises:
        ConfigError: an engine without capture cannot be built.
        NotSteadyError: an engine without capture gave too few steps.
    """
    tree, captured = variant
    cached_prompts = (
        [request.prompt_token_ids for context_requests in work.requests.values() for request in context_requests]
        if size.random_contexts
        else []
    )
    try:
        engine, models = loaded.engine(
            engine_config(pair, tree, size, captured), _oracle_wrap(work.expected, size, loaded), cached_prompts
        )
    except ConfigError as error:
        if not captured:
            raise
        skipped[f"{tree}, captured"] = str(error)
        return
    for context in size.contexts:
        for batch in size.batches:
            try:
                steps = run_steady_steps(engine, work.requests[context][:batch], size.steps, captured)
            except NotSteadyError as error:
                if not captured:
                    raise
                skipped[f"{tree}, batch {batch}, captured"] = str(error)
                continue
            yield MeasuredSteps(tree, batch, captured, steps, models)


@contextmanager
def subject_of(pair: ModelPair, size: Size, log_progress: LogProgress) -> Iterator[Subject]:
    """A context manager that yields the folders to measure, and deletes those of a random model at its end."""
    if size.shape is None:
        yield Subject(pair)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log_progress(f"roofline: making {size.shape}")
    with random_model(size.shape, size.layers, device, generate_on_read=True) as model:
        yield Subject(
            replace(pair, target=model.target, draft=model.draft), size.shape, model.layers, model.preset_layers
        )


def max_new_tokens(size: Size) -> int:
    """Return the `max_tokens` of requests: enough for the prefill steps of other requests and all measured steps."""
    computed_tokens = MAX_UNCACHED_TOKENS if size.random_contexts else max(size.contexts)
    prefill_steps = -(-max(size.batches) * computed_tokens // CHUNK_ROWS) + 1
    return (prefill_steps + WARMUP_STEPS + size.steps + 2) * (max(tree.num_steps for tree in size.trees) + 1)


def engine_config(pair: ModelPair, tree: TreeChoice, size: Size, captured: bool = False) -> EngineConfig:
    """Return an engine's config, with a KV capacity for the largest batch at the longest context."""
    requests = max(size.batches)
    length = max(max(size.contexts) + max_new_tokens(size), SAMPLE_TOKENS) + 16
    kv_tokens = requests * (length + 2 * tree.nodes + 2 * (tree.num_steps + 1) * tree.topk + 32)
    if size.random_contexts:
        kv_tokens += requests * (sum(size.contexts) - max(size.contexts))
    base = pair.config(tree, requests)
    return base.model_copy(
        update={
            "max_total_tokens": kv_tokens,
            "context_length": length,
            "chunked_prefill_size": CHUNK_ROWS,
            "capture": "on" if captured else "off",
            "capture_sizes": size.batches if captured and size.padded else None,
            "disable_radix_cache": not size.random_contexts,
        }
    )


def figure_rows(measurement: MeasuredSteps, itemsize: int, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Yield the figures of each phase, of all phases together (eager steps only), and of the whole step by the host's
    clock.
    """
    tree, batch, captured, steps, models = measurement
    context = mean(steps.context_tokens)
    demand = step_demand(models, batch, context, itemsize)
    all_forwards = [each for name in DEVICE_PHASES for each in demand[name]]
    figure = {"setting": str(tree), "batch": batch, "captured": captured, "context": context}
    figure |= {"accept_length": steps.tokens / len(steps.wall_seconds) / batch}
    for name, seconds in steps.phase_seconds.items():
        yield (
            figure
            | {"phase": name}
            | _figure(all_forwards if name == REPLAY else demand[name], median(seconds), ceilings)
        )
    if REPLAY not in steps.phase_seconds:
        total_seconds = [sum(each) for each in zip(*steps.phase_seconds.values(), strict=True)]
        yield figure | {"phase": "all"} | _figure(all_forwards, median(total_seconds), ceilings)
    yield figure | {"phase": "step"} | _figure(all_forwards, median(steps.wall_seconds), ceilings)


def _figure(forwards: list[Demand], seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    demand, least_s = sum(forwards, Demand()), least_seconds(forwards, ceilings)
    return {
        "ms": 1e3 * seconds,
        "possible_ms": 1e3 * least_s,
        "share": ratio(least_s, seconds) if forwards else None,
        "megabytes": demand.bytes_read / 1e6,
        "gigaflop": demand.operations / 1e9,
        "gigabytes_s": ratio(demand.bytes_read, seconds) / 1e9,
        "gigaflops": ratio(demand.operations, seconds) / 1e9,
        "bound": (
            "reading"
            if demand.bytes_read / ceilings.bytes_per_s >= demand.operations / ceilings.flops_per_s
            else "computing"
        )
        if forwards
        else "",
    }


def _make_requests(subject: Subject, loaded: LoadedModels, size: Size) -> dict[int, list[Request]]:
    """Return, by context length, requests for the largest batch; all seeds differ, from 0 on. Prompts are held-out text
    if the target's folder has a tokenizer and is not a random model's, otherwise random ids.
    """
    count, new_tokens = max(size.batches), max_new_tokens(size)
    has_text = subject.shape is None and (Path(subject.pair.target) / "tokenizer.json").is_file()
    requests: dict[int, list[Request]] = {}
    for number, length in enumerate(size.contexts):
        if has_text:
            prompts = subject.pair.prompts(count, length)
        else:
            prompts = random_prompts(loaded.vocab_size, count, length)
        seeds = range(number * count, (number + 1) * count)
        requests[length] = [
            Request(str(seed), tuple(prompt), fixed_length_params(new_tokens, seed=seed))
            for seed, prompt in zip(seeds, prompts, strict=True)
        ]
    return requests


def _expected_tokens(
    subject: Subject, loaded: LoadedModels, requests_by_context: dict[int, list[Request]], size: Size
) -> ExpectedTokens:
    """Return the correct continuations: known for a random target, otherwise generated here by plain decoding."""
    if subject.shape is not None:
        return CountingTokens(loaded.vocab_size)
    engine, _ = loaded.engine(engine_config(subject.pair, PLAIN, size))
    texts: list[list[int]] = []
    for requests in requests_by_context.values():
        texts += [list(request.prompt_token_ids) for request in requests]
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            for output in engine.step().outputs:
                texts[int(output.request_id)] += output.token_ids
    longest = max(map(len, texts))
    return RecordedTokens(torch.tensor([text + text[-1:] * (longest - len(text)) for text in texts]).to(loaded.device))


def _oracle_wrap(expected: ExpectedTokens | None, size: Size, loaded: LoadedModels) -> WrapDraft | None:
    """Return a function that replaces a draft by one with the synthetic accept length, or None if there is none."""
    if expected is None or size.accept_length is None:
        return None
    accept_length, expected_tokens = size.accept_length, expected

    def wrap_draft(draft: Draft, models: ResolvedConfig) -> Draft:
        tree_accept_length = min(accept_length, models.shape.num_steps + 1)
        return OracleDraft(draft, expected_tokens, tree_accept_length, models.target.vocab_size, loaded.device)

    return wrap_draft


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the demo pair's goals for batches of at least `GOAL_BATCH` on a CPU; on a GPU, none. Captured steps must
    reach a share of the possible speed at short contexts, and at least about the eager steps' speed at all contexts.
    """
    steps = [row for row in result["figures"] if row["phase"] == "step" and row["batch"] >= GOAL_BATCH]
    if result["device"] != "cpu":
        return []
    goal_list = []
    for row in (row for row in steps if row["captured"]):
        load = f"{row['setting']}, batch {row['batch']}, context {row['context']:.0f}"
        if row["context"] <= GOAL_CONTEXT:
            bound = GOAL_CHAIN if row["setting"] == str(PLAIN) or "chain" in row["setting"] else GOAL_TREE
            goal_list.append(Goal(f"share of the possible, {load}", row["share"], bound, True))
        eager_rows = [eager_row for eager_row in steps if not eager_row["captured"] and _same_load(row, eager_row)]
        goal_list += [
            Goal(f"captured over launched, {load}", ratio(eager_row["ms"], row["ms"]), MIN_CAPTURE_SPEEDUP, True)
            for eager_row in eager_rows
        ]
    return goal_list


def _same_load(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two figures have the same setting, batch and initial context."""
    # Contexts grow while steps are measured, so the means of equal loads differ a little.
    similar_context = abs(first["context"] - second["context"]) < 64
    return similar_context and all(first[key] == second[key] for key in ("setting", "batch"))


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    keys = {"setting": "setting", "batch": "batch", "context": "context", "accepted": "accept_length"}
    keys |= {"phase": "phase", "ms": "ms", "possible ms": "possible_ms", "of possible": "share", "MB": "megabytes"}
    keys |= {"GB/s": "gigabytes_s", "GFLOP": "gigaflop", "bound by": "bound"}
    setting_cells = (
        {"setting": figure["setting"] + (", captured" if figure["captured"] else "")} for figure in result["figures"]
    )
    rows = [
        figure | setting_cell | {"megabytes": round(figure["megabytes"], 1)}
        for figure, setting_cell in zip(result["figures"], setting_cells, strict=True)
    ]
    layers_text = "" if result["layers"] is None else ", {} of {} layers".format(*result["layers"])
    lines = [
        f"roofline: {result['target']}{layers_text}, {result['dtype']}, on {result['device']}, kernels in "
        f"{result['kernels']}",
        f"at best {result['gigabytes_s']:.1f} GB/s read and {result['gigaflops']:.0f} GFLOP/s, measured in this run; "
        f"medians of {result['steps']} steps",
        *(f"weights count in {result['dtype']}, but {line}" for line in result["quantised"]),
        columns_table(rows, keys, rounded_headers=["context"]),
        *(f"not measured: {name}: {reason}" for name, reason in result["skipped"].items()),
        "all: the phases together; step: from one step to the next by the host's clock",
    ]
    return "\n".join(lines)
