"""The roofline part of `aerie bench`: it compares the time of a step with the least time possible on the machine."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.arch.resolve import ResolvedConfig, resolve_models
from cluster.bench import command
from cluster.bench.cases import roofline
from cluster.bench.cases.roofline import MeasuredSteps, Size, figure_rows
from cluster.bench.ceilings import Ceilings
from cluster.bench.demand import step_demand
from cluster.bench.loaded import LoadedModels, WrapDraft
from cluster.bench.pair import PLAIN, ModelPair, TreeChoice
from cluster.bench.steady import SteadySteps
from cluster.config import ConfigError, EngineConfig
from cluster.dp_attention.sizes import Buckets
from cluster.engine import Engine, StepResult
from cluster.observability.step_stats import DEVICE_PHASES
from tests.parity.harness import config_of, tiny_pair
from tests.support.sources import SOURCES
from tests.test_layers import imports_of, module_of
from tests.unit.bench.test_command import parse_arguments

SIZE = Size((PLAIN, TreeChoice(2, 2, 4)), (1, 2), (8,), 3, 2.0, "tiny")


def print_nothing(text: str) -> None:
    """A progress callback that prints nothing."""


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measure_ceilings", lambda **_: Ceilings(1e9, 1e10))


@pytest.mark.slow
def test_roofline_measures_every_phase_eager_and_captured() -> None:
    result = roofline.measure(ModelPair(num_threads=1), SIZE, print_nothing)
    assert not result["skipped"] and result["layers"] == [4, 4]
    phases = [(figure["setting"], figure["batch"], figure["captured"], figure["phase"]) for figure in result["figures"]]
    names = ("draft", "target", "extend", "all", "step"), ("replay", "step")
    assert phases == [
        (str(tree), batch, captured, name)
        for tree in SIZE.trees
        for captured in (False, True)
        for batch in SIZE.batches
        for name in names[captured]
    ]
    for figure in result["figures"]:
        assert figure["ms"] > 0
        share = figure["possible_ms"] / figure["ms"] if figure["megabytes"] else None
        assert figure["share"] == (share if share is None else pytest.approx(share))
        assert figure["accept_length"] == pytest.approx(1.0 if figure["setting"] == "plain" else 2.0)
        assert figure["context"] >= 8
    text = roofline.show(result)
    assert "topk 2, 2 levels, 4 nodes, captured" in text and "tiny, 4 of 4 layers, float32, on cpu" in text


@pytest.mark.slow
def test_roofline_random_contexts_skip_prefill_and_report_each_figure_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both contexts are in the prefix cache, and the bench reports each figure as soon as it is measured."""
    prompt_rows: list[int] = []
    original_step = Engine.step

    def recording_step(self: Engine) -> StepResult:
        result = original_step(self)
        prompt_rows.append(result.stats.prompt_rows)
        return result

    monkeypatch.setattr(Engine, "step", recording_step)
    reported_figures: list[dict[str, Any]] = []
    size = replace(SIZE, contexts=(40, 90), random_contexts=True, padded=True)
    result = roofline.measure(ModelPair(num_threads=1), size, print_nothing, reported_figures.append)
    assert reported_figures == result["figures"] and not result["skipped"]
    assert 0 < max(prompt_rows) <= 2 * roofline.MAX_UNCACHED_TOKENS and {
        figure["captured"] for figure in reported_figures
    } == {False, True}
    for figure in reported_figures:
        assert figure["accept_length"] == pytest.approx(1.0 if figure["setting"] == "plain" else 2.0)
        assert figure["context"] >= (90 if figure["context"] > 60 else 40)
    with pytest.raises(ConfigError, match="random_contexts belong to a random model"):
        roofline.measure(ModelPair(), replace(size, shape=None), print_nothing)


def test_roofline_measures_target_alone_and_pair_with_requested_accept_length() -> None:
    target, draft = tiny_pair()
    small_size = replace(SIZE, shape=None, accept_length=None, captured=(False,), batches=(1,))
    target_result = roofline.measure(ModelPair(target, "", "float64", 1), small_size, print_nothing)
    assert {figure["setting"] for figure in target_result["figures"]} == {"plain"}
    oracle_result = roofline.measure(
        ModelPair(target, draft, "float64", 1), replace(small_size, accept_length=3.0), print_nothing
    )
    assert oracle_result["figures"][-1]["accept_length"] == 3.0


def test_roofline_reports_why_capture_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    original_engine = LoadedModels.engine

    def engine_without_capture(
        self: LoadedModels, config: EngineConfig, wrap: WrapDraft | None, cached_prompts: Any
    ) -> tuple[Engine, ResolvedConfig]:
        if config.capture == "on":
            raise ConfigError("capture on runs elsewhere")
        return original_engine(self, config, wrap, cached_prompts)

    monkeypatch.setattr(LoadedModels, "engine", engine_without_capture)
    result = roofline.measure(
        ModelPair(num_threads=1), replace(SIZE, trees=(PLAIN,), accept_length=None), print_nothing
    )
    assert result["skipped"] == {"plain, captured": "capture on runs elsewhere"}
    assert "not measured: plain, captured: capture on runs elsewhere" in roofline.show(result)


def test_roofline_lists_batches_too_large_to_capture_as_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.engine.captures.buckets_of", lambda *_: Buckets((), max_rows=1))
    size = replace(SIZE, trees=(PLAIN,), accept_length=None)
    result = roofline.measure(ModelPair(num_threads=1), size, print_nothing)
    assert list(result["skipped"]) == ["plain, batch 2, captured"]
    assert "requests ended after 0 steady replayed steps" in result["skipped"]["plain, batch 2, captured"]
    assert {(figure["batch"], figure["captured"]) for figure in result["figures"]} == {
        (1, False),
        (1, True),
        (2, False),
    }


def test_roofline_possible_time_is_the_sum_over_forwards() -> None:
    """A step of a chain of 3 has two draft levels, one verification and one extend, and each has its own bound."""
    models = resolve_models(config_of(*tiny_pair()))
    steps = SteadySteps({name: [0.1, 0.3, 0.2] for name in DEVICE_PHASES}, [0.7, 0.8, 0.9], [10.0, 12.0, 14.0], 12)
    ceilings = Ceilings(1e6, 1e9)
    rows = {
        row["phase"]: row for row in figure_rows(MeasuredSteps(TreeChoice(3), 2, False, steps, models), 8, ceilings)
    }
    demand = step_demand(models, 2, 12.0, 8)
    for name in DEVICE_PHASES:
        possible = sum(max(forward.bytes_read / 1e6, forward.operations / 1e9) for forward in demand[name])
        assert rows[name]["possible_ms"] == pytest.approx(1e3 * possible)
        assert rows[name]["share"] == pytest.approx(possible / 0.2)
    assert rows["all"]["ms"] == pytest.approx(600.0) and rows["step"]["ms"] == pytest.approx(800.0)
    assert rows["step"]["accept_length"] == 2.0 and rows["step"]["context"] == 12.0


def test_roofline_goals_apply_to_captured_cpu_steps() -> None:
    def step(setting: str, batch: int, captured: bool, context: float, share: float, ms: float) -> dict[str, Any]:
        return {"phase": "step", "setting": setting, "batch": batch, "captured": captured, "context": context} | {
            "share": share,
            "ms": ms,
        }

    figures = [
        *(step("plain", 8, captured, 130.0 + captured, 0.6, 1.0 - captured / 2) for captured in (False, True)),
        *(step("topk 8, 5 levels, 32 nodes", 32, captured, 140.0, 0.66, 1.0 + captured) for captured in (False, True)),
        step("plain", 1, True, 130.0, 0.1, 1.0),
        step("plain", 8, True, 1030.0, 0.1, 1.0),
    ]
    judged_goals = roofline.goals({"device": "cpu", "figures": figures})
    assert [(goal.name, goal.value, goal.is_met(quick=False)) for goal in judged_goals] == [
        ("share of the possible, plain, batch 8, context 131", 0.6, False),
        ("captured over launched, plain, batch 8, context 131", 2.0, True),
        ("share of the possible, topk 8, 5 levels, 32 nodes, batch 32, context 140", 0.66, True),
        ("captured over launched, topk 8, 5 levels, 32 nodes, batch 32, context 140", 0.5, False),
    ]
    assert roofline.goals({"device": "a GPU", "figures": figures}) == []


def test_roofline_bad_input_raises_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"accept_length 3\.5 is not within 1 and 3"):
        roofline.measure(ModelPair(), replace(SIZE, accept_length=3.5), print_nothing)
    with pytest.raises(ConfigError, match="layers belong to a random model"):
        roofline.measure(ModelPair(), replace(SIZE, shape=None, layers=4), print_nothing)
    with pytest.raises(ValueError, match="--shape makes its own model"):
        command.run(parse_arguments("roofline", "--shape", "tiny", "--model", "x", "--draft", "y"))
    with pytest.raises(ValueError, match="--accept-length is an option of roofline"):
        command.run(parse_arguments("packed", "--accept-length", "2"))


def test_roofline_flags_reach_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    received_sizes: list[Size] = []
    monkeypatch.setattr(roofline, "measure", lambda pair, size, log_progress: received_sizes.append(size) or {})
    monkeypatch.setattr(roofline, "show", lambda result: "")
    flags = ("--shape", "tiny", "--layers", "4", "--contexts", "5", "6", "--batches", "2", "--accept-length", "1.5")
    assert command.run(parse_arguments("roofline", *flags)) == 0
    (size,) = received_sizes
    assert (size.shape, size.layers, size.contexts, size.batches, size.accept_length) == ("tiny", 4, (5, 6), (2,), 1.5)


def test_roofline_imports_no_ray_module() -> None:
    """No module that the roofline part imports, directly or indirectly, imports Ray."""
    paths = {module_of(path): path for path in SOURCES}
    visited_modules, modules_to_visit = set[str](), ["cluster.bench.cases.roofline"]
    while modules_to_visit:
        if (module := modules_to_visit.pop()) not in visited_modules:
            visited_modules.add(module)
            names = [name for _, name in imports_of(paths[module])]
            assert not any(name.split(".")[0] == "ray" for name in names), module
            modules_to_visit += [name for name in names if name in paths]
    assert "cluster.engine.build" in visited_modules
