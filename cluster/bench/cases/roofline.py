"""`aerie bench roofline`: the time of each phase of a step, against the least possible time on this machine.

The least time is the longer of two: the time to read the phase's data, and the time of the phase's operations. Both are
computed from rates measured in the same run (`demand`, `ceilings`). Eager steps are measured phase by phase; a captured
step is a single phase. The model is any folder, or a random model with the shape of a real one. The accept length is
that of the draft, or synthetic. From Python, call `measure(Pair(target, draft), Size(..))`.

A random model's weights are generated on the device. If `held` is set, KV cells are generated too:
the prefix cache then holds the prompts, with random numbers as cells, and only the last tokens of prompts are computed.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cluster.arch.resolve import ResolvedConfig
from cluster.bench.ceilings import Ceilings, ceilings
from cluster.bench.demand import Demand, least_seconds, step_demand
from cluster.bench.goals import Goal
from cluster.bench.loaded import Loaded, Wrap
from cluster.bench.oracle_draft import Counting, OracleDraft, Truth, WrittenTruth
from cluster.bench.pair import PLAIN, Pair, TreeChoice, short_path
from cluster.bench.random_models import made_up, random_prompts
from cluster.bench.report import Say, columns, machine, mean, median, ratio
from cluster.bench.runs import params_of
from cluster.bench.steady import WARM, NotSteadyError, SteadySteps, steady
from cluster.config import ConfigError, EngineConfig
from cluster.observability.metrics import DEVICE_PHASES, REPLAY
from cluster.request import Request
from cluster.spec.draft import Draft

CHUNK = 2048  # prompt rows of a step, before the steady steps
SAMPLE_TOKENS = 256  # context length that checking a draft's sample may need
HELD = 64  # upper bound of the tokens to compute of a prompt whose full pages are in the prefix cache
GOAL_BATCH, GOAL_CONTEXT = 8, 256  # the least batch with goals, and the longest context with a goal for the share
GOAL_LINE, GOAL_TREE = 0.70, 0.65  # goals for the share of the possible speed: plain decoding and chains, and trees
EQUAL = 0.98  # least speed of captured steps over eager steps; a lower ratio is more than noise


@dataclass(frozen=True, slots=True)
class Size:
    """What to measure: each of `trees` with each batch size and each context length, for `steps` steady steps.

    `accept_length` is the synthetic accept length, limited by the depth of a tree; if None, the draft's own tokens
    count. `shape` is a preset of `random_models`, measured instead of folders, with `layers` layers; if `layers` is
    None, with all that fit. `captured` lists the capture settings to measure. `held`: contexts of a `shape` are random,
    not computed. `padded`: captured steps are padded to `batches`, for which programs are captured at start.
    """

    trees: tuple[TreeChoice, ...] = (PLAIN, TreeChoice(3), TreeChoice(5, 8, 32))
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024)
    steps: int = 24
    accept_length: float | None = None
    shape: str | None = None
    layers: int | None = None
    captured: tuple[bool, ...] = (False, True)
    held: bool = False
    padded: bool = False


QUICK = Size(batches=(1, 8), contexts=(64,), steps=6)


@dataclass(frozen=True, slots=True)
class Subject:
    """The measured folders. For a random model, also its preset `shape`, its number of `layers`, and the `full` number
    of layers of the preset.
    """

    pair: Pair
    shape: str | None = None
    layers: int = 0
    full: int = 0


class Measured(NamedTuple):
    """Steady steps of one tree at one batch size, and the resolved models that ran them."""

    tree: TreeChoice
    batch: int
    captured: bool
    steps: SteadySteps
    models: ResolvedConfig


class Work(NamedTuple):
    """The requests of each context, and the correct continuations if the accept length is synthetic."""

    asked: dict[int, list[Request]]
    truth: Truth | None


Note = Callable[[dict[str, Any]], None]
"""A callback that gets every figure as soon as it is measured, with a share computed from the rates at the start."""


def measure(pair: Pair, size: Size, say: Say = print, note: Note = lambda row: None) -> dict[str, Any]:
    """Measure all trees, batches and contexts; return the figures, JSON-ready.

    Raises:
        ConfigError: the shape is unknown, no tree can have the accept length, or `layers` or `held` is set without a
            shape.
    """
    trees = size.trees if pair.draft or size.shape else (PLAIN,)
    deepest = max(tree.num_steps for tree in trees)
    if size.accept_length is not None and not 1 <= size.accept_length <= deepest + 1:
        raise ConfigError(f"accept_length {size.accept_length:g} is not within 1 and {deepest + 1}, the deepest tree's")
    if size.layers is not None and size.shape is None:
        raise ConfigError("layers belong to a made-up shape; give a shape as well")
    if size.held and size.shape is None:
        raise ConfigError("held contexts belong to a made-up shape; give a shape as well")
    with subject_of(pair, size, say) as subject:
        return _measured(subject, replace(size, trees=trees), say, note)


def _measured(subject: Subject, size: Size, say: Say, note: Note) -> dict[str, Any]:
    deepest = max(size.trees, key=lambda tree: (tree.num_steps, tree.nodes))
    loaded = Loaded(config_of(subject.pair, deepest, size))
    first = ceilings(device=loaded.device, dtype=loaded.dtype)
    say(f"roofline: {first.bytes / 1e9:.1f} GB/s read, {first.flops / 1e9:.0f} GFLOP/s")
    asked = _asked(subject, loaded, size)
    work = Work(asked, None if size.accept_length is None else _truth(subject, loaded, asked, size))
    measured: list[Measured] = []
    skipped: dict[str, str] = {}
    for tree in size.trees:
        for captured in size.captured:
            say(f"roofline: {tree}, {'captured' if captured else 'as it is'}")
            for each in _of_engine(loaded, subject.pair, size, work, (tree, captured), skipped):
                measured.append(each)
                for row in rows_of(each, loaded.dtype.itemsize, first):
                    note(row)
            gc.collect()  # otherwise this engine's KV cache would still use memory when the next one is allocated
    best = first.best(ceilings(device=loaded.device, dtype=loaded.dtype))
    figures = [row for each in measured for row in rows_of(each, loaded.dtype.itemsize, best)]
    return {
        "what": "roofline",
        "machine": machine(),
        "device": torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "cpu",
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kernels": loaded.kernels,
        "quantised": list(loaded.quantised),
        "target": subject.shape or short_path(subject.pair.target),
        "layers": [subject.layers, subject.full] if subject.shape else None,
        "gigabytes_s": best.bytes / 1e9,
        "gigaflops": best.flops / 1e9,
        "steps": size.steps,
        "asked_accept_length": size.accept_length,
        "skipped": skipped,
        "figures": figures,
    }


def _of_engine(
    loaded: Loaded, pair: Pair, size: Size, work: Work, what: tuple[TreeChoice, bool], skipped: dict[str, str]
) -> Iterator[Measured]:
    """Yield the steady steps of one engine at every context and batch. `what` is the engine's tree, and whether the
    engine captures steps. Steps that cannot be captured are left out, and the reason goes to `skipped`.

    Raises:
        ConfigError: an engine without capture cannot be built.
        NotSteadyError: an engine without capture gave too few steps.
    """
    tree, captured = what
    held = [request.prompt_token_ids for each in work.asked.values() for request in each] if size.held else []
    try:
        engine, models = loaded.engine(config_of(pair, tree, size, captured), _wrap(work.truth, size, loaded), held)
    except ConfigError as error:
        if not captured:
            raise
        skipped[f"{tree}, captured"] = str(error)
        return
    for context in size.contexts:
        for batch in size.batches:
            try:
                steps = steady(engine, work.asked[context][:batch], size.steps, captured)
            except NotSteadyError as error:
                if not captured:
                    raise
                skipped[f"{tree}, batch {batch}, captured"] = str(error)
                continue
            yield Measured(tree, batch, captured, steps, models)


@contextmanager
def subject_of(pair: Pair, size: Size, say: Say) -> Iterator[Subject]:
    """Yield the folders to measure; the folders of a random model are deleted afterwards."""
    if size.shape is None:
        yield Subject(pair)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    say(f"roofline: making {size.shape}")
    with made_up(size.shape, size.layers, device, sow=True) as made:
        yield Subject(replace(pair, target=made.target, draft=made.draft), size.shape, made.layers, made.full)


def most_new(size: Size) -> int:
    """Return how many tokens a request may generate, including those that it generates during others' prefill."""
    computed = HELD if size.held else max(size.contexts)
    prompts = -(-max(size.batches) * computed // CHUNK) + 1
    return (prompts + WARM + size.steps + 2) * (max(tree.num_steps for tree in size.trees) + 1)


def config_of(pair: Pair, tree: TreeChoice, size: Size, captured: bool = False) -> EngineConfig:
    """Return an engine's config with a KV capacity for the largest batch and context."""
    requests = max(size.batches)
    length = max(max(size.contexts) + most_new(size), SAMPLE_TOKENS) + 16
    room = requests * (length + 2 * tree.nodes + 2 * (tree.num_steps + 1) * tree.topk + 32)
    if size.held:
        room += requests * (sum(size.contexts) - max(size.contexts))
    base = pair.config(tree, requests)
    return base.model_copy(
        update={
            "max_total_tokens": room,
            "context_length": length,
            "chunked_prefill_size": CHUNK,
            "capture": "on" if captured else "off",
            "capture_sizes": size.batches if captured and size.padded else None,
            "disable_radix_cache": not size.held,
        }
    )


def rows_of(measured: Measured, itemsize: int, best: Ceilings) -> Iterator[dict[str, Any]]:
    """Yield the figures of each phase, of all phases together (eager steps only), and of the whole step by the host's
    clock.
    """
    tree, batch, captured, steps, models = measured
    context = mean(steps.contexts)
    demand = step_demand(models, batch, context, itemsize)
    whole = [each for name in DEVICE_PHASES for each in demand[name]]
    facts = {"setting": str(tree), "batch": batch, "captured": captured, "context": context}
    facts |= {"accept_length": steps.tokens / len(steps.walls) / batch}
    for name, seconds in steps.phases.items():
        yield facts | {"phase": name} | _figure(whole if name == REPLAY else demand[name], median(seconds), best)
    if REPLAY not in steps.phases:
        together = [sum(each) for each in zip(*steps.phases.values(), strict=True)]
        yield facts | {"phase": "all"} | _figure(whole, median(together), best)
    yield facts | {"phase": "step"} | _figure(whole, median(steps.walls), best)


def _figure(forwards: list[Demand], seconds: float, best: Ceilings) -> dict[str, Any]:
    total, least = sum(forwards, Demand()), least_seconds(forwards, best)
    return {
        "ms": 1e3 * seconds,
        "possible_ms": 1e3 * least,
        "share": ratio(least, seconds) if forwards else None,
        "megabytes": total.read / 1e6,
        "gigaflop": total.computed / 1e9,
        "gigabytes_s": ratio(total.read, seconds) / 1e9,
        "gigaflops": ratio(total.computed, seconds) / 1e9,
        "bound": ("reading" if total.read / best.bytes >= total.computed / best.flops else "computing")
        if forwards
        else "",
    }


def _asked(subject: Subject, loaded: Loaded, size: Size) -> dict[int, list[Request]]:
    """Return, by context, requests for the largest batch, with distinct seeds from 0 on. Prompts are held-out text if
    the folder has a tokenizer, otherwise random ids.
    """
    count, new = max(size.batches), most_new(size)
    readable = subject.shape is None and (Path(subject.pair.target) / "tokenizer.json").is_file()
    asked: dict[int, list[Request]] = {}
    for number, length in enumerate(size.contexts):
        if readable:
            prompts = subject.pair.prompts(count, length)
        else:
            prompts = random_prompts(loaded.vocab_size, count, length)
        seeds = range(number * count, (number + 1) * count)
        asked[length] = [
            Request(str(seed), tuple(prompt), params_of(new, seed=seed))
            for seed, prompt in zip(seeds, prompts, strict=True)
        ]
    return asked


def _truth(subject: Subject, loaded: Loaded, asked: dict[int, list[Request]], size: Size) -> Truth:
    """Return the correct continuations. A random target's are known; another target's are generated by plain
    decoding.
    """
    if subject.shape is not None:
        return Counting(loaded.vocab_size)
    engine, _ = loaded.engine(config_of(subject.pair, PLAIN, size))
    texts: list[list[int]] = []
    for requests in asked.values():
        texts += [list(request.prompt_token_ids) for request in requests]
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            for output in engine.step().outputs:
                texts[int(output.request_id)] += output.token_ids
    longest = max(map(len, texts))
    return WrittenTruth(torch.tensor([text + text[-1:] * (longest - len(text)) for text in texts]).to(loaded.device))


def _wrap(truth: Truth | None, size: Size, loaded: Loaded) -> Wrap | None:
    """Return a function that replaces a draft by an oracle draft, or None if the draft's own tokens count."""
    if truth is None or size.accept_length is None:
        return None
    wanted, known = size.accept_length, truth

    def told(draft: Draft, models: ResolvedConfig) -> Draft:
        most = min(wanted, models.shape.num_steps + 1)
        return OracleDraft(draft, known, most, models.target.vocab_size, loaded.device)

    return told


def goals(result: dict[str, Any]) -> list[Goal]:
    """Return the demo pair's goals on a CPU, for batches of at least `GOAL_BATCH`. Captured steps must reach a share of
    the possible speed at short contexts, and about the speed of eager steps at every context.
    """
    steps = [one for one in result["figures"] if one["phase"] == "step" and one["batch"] >= GOAL_BATCH]
    if result["device"] != "cpu":
        return []
    found = []
    for one in (one for one in steps if one["captured"]):
        what = f"{one['setting']}, batch {one['batch']}, context {one['context']:.0f}"
        if one["context"] <= GOAL_CONTEXT:
            bound = GOAL_LINE if one["setting"] == str(PLAIN) or "chain" in one["setting"] else GOAL_TREE
            found.append(Goal(f"share of the possible, {what}", one["share"], bound, True))
        launched = [two for two in steps if not two["captured"] and _same_load(one, two)]
        found += [Goal(f"captured over launched, {what}", ratio(two["ms"], one["ms"]), EQUAL, True) for two in launched]
    return found


def _same_load(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Return whether two figures have the same setting, batch and initial context."""
    near = abs(one["context"] - two["context"]) < 64  # contexts grow while steps are measured, so their means differ
    return near and all(one[key] == two[key] for key in ("setting", "batch"))


def show(result: dict[str, Any]) -> str:
    """Return the figures as a table."""
    keys = {"setting": "setting", "batch": "batch", "context": "context", "accepted": "accept_length"}
    keys |= {"phase": "phase", "ms": "ms", "possible ms": "possible_ms", "of possible": "share", "MB": "megabytes"}
    keys |= {"GB/s": "gigabytes_s", "GFLOP": "gigaflop", "bound by": "bound"}
    shown = ({"setting": one["setting"] + (", captured" if one["captured"] else "")} for one in result["figures"])
    rows = [
        one | own | {"megabytes": round(one["megabytes"], 1)} for one, own in zip(result["figures"], shown, strict=True)
    ]
    layers = "" if result["layers"] is None else ", {} of {} layers".format(*result["layers"])
    lines = [
        f"roofline: {result['target']}{layers}, {result['dtype']}, on {result['device']}, kernels in "
        f"{result['kernels']}",
        f"at best {result['gigabytes_s']:.1f} GB/s read and {result['gigaflops']:.0f} GFLOP/s, measured in this run; "
        f"medians of {result['steps']} steps",
        *(f"weights count in {result['dtype']}, but {line}" for line in result["quantised"]),
        columns(rows, keys, whole=["context"]),
        *(f"not measured: {name}: {why}" for name, why in result["skipped"].items()),
        "all: the phases together; step: from one step to the next by the host's clock",
    ]
    return "\n".join(lines)
