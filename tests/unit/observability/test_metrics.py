"""The metrics: what each event adds, what that costs, and the merged page of ranks and replicas as a
scraper reads it.
"""

import json
import time
from dataclasses import replace
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.actors.messages import LossKind
from cluster.observability.exposition import VLLM_NAMES, with_replica
from cluster.observability.metrics import LOSS_KINDS, OUTCOMES, STATUSES, EngineMetrics, ServingMetrics, merge
from cluster.observability.step_stats import PHASES, StepStats
from cluster.status import EngineStatus

STEP = StepStats(
    phase_seconds=dict.fromkeys(PHASES, 0.003),
    decode_requests=8,
    prompt_rows=16,
    padded_rows=4,
    target_rows=208,
    accept_lens=[1, 2, 3, 4, 5, 1, 2, 6],
    accepted_by_depth=[6, 4, 3, 2, 1],
    drafts=8,
    verified_nodes=184,
    committed_tokens=24,
    cached_tokens=5,
    prompt_tokens=21,
    admitted=3,
    retracted=1,
    nonfinite=1,
    tree=(3, 4, 0),
    expected_tokens=20.25,
    explored=1,
    woken=1,
    forced_nodes=3,
    looked_up_tokens=5,
    undrafted="cost",
    status=EngineStatus(running=8, waiting=2, queued_tokens=99, pages_free=10, pages_used=30, pages_cached=40),
)


def series(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the value of each series of a page, as a scraper reads it, keyed by name and labels. The label
    `model_name`, which is the same everywhere, is left out.
    """
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def engine(rank: int = 0, *steps: StepStats) -> EngineMetrics:
    metrics = EngineMetrics(model_name="m", rank=rank, trees=[(0, 1, 0), (3, 4, 0)])
    for step in steps:
        metrics.observe_step(replace(step, rank=rank))
    return metrics


def test_observe_step_adds_every_field_to_its_metric() -> None:
    page = series(merge([engine(0, STEP, STEP).serialize()]))
    rank = (("rank", "0"),)
    expected = {
        "aerie_steps_total": 2,
        "aerie_decode_requests_total": 16,
        "aerie_expected_tree_tokens_total": 40.5,
        "aerie_explored_steps_total": 2,
        "aerie_woken_drafts_total": 2,
        "aerie_forced_nodes_total": 6,
        "aerie_accepted_lookups_total": 10,
        "aerie_prompt_rows_total": 32,
        "aerie_padded_rows_total": 8,
        "aerie_target_rows_total": 416,
        "aerie_drafts_total": 16,
        "aerie_verified_nodes_total": 368,
        "aerie_accepted_draft_tokens_total": 32,
        "aerie_generated_tokens_total": 48,
        "aerie_cached_tokens_total": 10,
        "aerie_prompt_tokens_total": 42,
        "aerie_admitted_requests_total": 6,
        "aerie_retractions_total": 2,
        "aerie_nonfinite_requests_total": 2,
        "aerie_running_requests": 8,
        "aerie_waiting_requests": 2,
        "aerie_queued_tokens": 99,
        "aerie_accept_length_count": 16,
        "aerie_accept_length_sum": 48,
    }
    assert {name: page[name, rank] for name in expected} == expected
    for depth, count in enumerate(STEP.accepted_by_depth, start=1):
        assert page["aerie_accepted_by_depth_total", (("depth", str(depth)), *rank)] == 2 * count
    assert page["aerie_tree_steps_total", (("levels", "3"), ("looked_up", "0"), ("nodes", "4"), *rank)] == 2
    assert page["aerie_tree_steps_total", (("levels", "0"), ("looked_up", "0"), ("nodes", "1"), *rank)] == 0
    for reason, count in (("cost", 2), ("limit", 0), ("waking", 0)):
        assert page["aerie_undrafted_steps_total", (*rank, ("reason", reason))] == count
    for state, pages in (("free", 10), ("used", 30), ("cached", 40)):
        assert page["aerie_kv_pages", (*rank, ("state", state))] == pages
    for phase in PHASES:
        assert page["aerie_step_phase_seconds_count", (("phase", phase), *rank)] == 2
        assert page["aerie_step_phase_seconds_sum", (("phase", phase), *rank)] == pytest.approx(0.006)
    assert page["aerie_accept_length_bucket", (("le", "2.0"), *rank)] == 8


def test_observe_step_refuses_another_rank_and_unknown_phases() -> None:
    with pytest.raises(ValueError, match="rank 1 given to the metrics of rank 0"):
        engine(0).observe_step(replace(STEP, rank=1))
    with pytest.raises(KeyError, match="laziness"):
        engine(0).observe_step(StepStats(undrafted="laziness"))
    with pytest.raises(KeyError, match="prefill"):
        engine(0).observe_step(StepStats(phase_seconds={"prefill": 0.1}))


def test_observe_step_takes_less_than_200_microseconds() -> None:
    metrics = engine(0, STEP)
    best = min(_seconds_of(lambda: metrics.observe_step(STEP), 200) for _ in range(15))
    assert best < 200e-6, f"{best * 1e6:.0f} us; about 40 on a 2020s core; 200 allows for a busy machine"


def _seconds_of(call: object, times: int) -> float:
    assert callable(call)
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def test_request_timer_measures_ttft_itl_and_total_time() -> None:
    metrics = ServingMetrics(model_name="m")
    timer = metrics.on_start(now=10.0)
    assert series(merge([metrics.serialize()]))["aerie_open_requests", (("state", "waiting"),)] == 1
    timer.on_tokens(1, now=10.5)
    page = series(merge([metrics.serialize()]))
    assert page["aerie_open_requests", (("state", "waiting"),)] == 0
    assert page["aerie_open_requests", (("state", "streaming"),)] == 1
    timer.on_tokens(3, now=10.53)
    timer.on_tokens(0, now=10.6)
    timer.on_tokens(2, now=10.61)
    timer.on_finish("length", prompt_tokens=12, now=10.7)
    timer.on_finish("abort", prompt_tokens=12, now=11.0)
    timer.on_tokens(5, now=12.0)
    page = series(merge([metrics.serialize()]))
    assert page["aerie_open_requests", (("state", "streaming"),)] == 0
    assert page["aerie_ttft_seconds_sum", ()] == pytest.approx(0.5)
    assert page["aerie_itl_seconds_count", ()] == 5
    assert page["aerie_itl_seconds_sum", ()] == pytest.approx(0.11), "the gaps add up to the last minus the first time"
    assert page["aerie_itl_seconds_bucket", (("le", "0.012"),)] == 3, "a chunk of three counts three tokens of 10 ms"
    assert page["aerie_e2e_seconds_sum", ()] == pytest.approx(0.7)
    assert page["aerie_request_prompt_tokens_sum", ()] == 12
    assert page["aerie_request_generation_tokens_sum", ()] == 6
    assert page["aerie_requests_total", (("outcome", "length"),)] == 1
    assert page["aerie_requests_total", (("outcome", "abort"),)] == 0


def test_request_outcomes_are_a_fixed_set() -> None:
    metrics = ServingMetrics(model_name="m")
    metrics.on_refused("overloaded")
    metrics.on_refused("invalid")
    metrics.on_start(now=0.0).on_finish("abort", prompt_tokens=1, now=1.0)
    page = series(merge([metrics.serialize()]))
    counts = {
        dict(labels)["outcome"]: value for (name, labels), value in page.items() if name == "aerie_requests_total"
    }
    assert counts == dict.fromkeys(OUTCOMES, 0) | {"overloaded": 1, "invalid": 1, "abort": 1}
    assert page["aerie_ttft_seconds_count", ()] == 0, "no token was sent"
    with pytest.raises(KeyError):
        metrics.on_refused("teapot")  # type: ignore[arg-type]


def test_merge_adds_replicas_and_keeps_ranks_separate() -> None:
    serving = [ServingMetrics(model_name="m") for _ in range(2)]
    for metrics in serving:
        timer = metrics.on_start(now=0.0)
        timer.on_tokens(1, now=0.02)
    samples = [engine(0, STEP), engine(1, STEP, STEP), engine(0, STEP)]
    page = series(merge([*(m.serialize() for m in samples), *(m.serialize() for m in serving)]))
    assert page["aerie_generated_tokens_total", (("rank", "0"),)] == 48
    assert page["aerie_generated_tokens_total", (("rank", "1"),)] == 48
    assert page["aerie_accept_length_bucket", (("le", "+Inf"), ("rank", "0"))] == 16
    assert page["aerie_kv_pages", (("rank", "0"), ("state", "used"))] == 60
    assert page["aerie_open_requests", (("state", "streaming"),)] == 2
    assert page["aerie_ttft_seconds_count", ()] == 2


def test_absent_replica_does_not_change_the_series_of_other_replicas() -> None:
    """While a gang restarts, its ranks report nothing. A sum without them would look like counters that were reset."""
    samples = [with_replica(engine(0, STEP).serialize(), name) for name in ("a", "b")]
    series_of_two, series_of_one = series(merge(samples)), series(merge(samples[:1]))
    assert series_of_one.items() <= series_of_two.items()
    name = "aerie_generated_tokens_total"
    assert [series_of_two[name, (("rank", "0"), ("replica", replica))] for replica in "ab"] == [24, 24]
    serving = ServingMetrics(model_name="m", replica="a").serialize()
    assert ("aerie_ttft_seconds_count", (("replica", "a"),)) in series(merge([serving, *samples]))


def test_merged_rank_metrics_use_the_served_model_name() -> None:
    rank = EngineMetrics(model_name="folder", rank=0)
    serving = ServingMetrics(model_name="org/name").serialize()
    page = merge([rank.serialize(), serving, serving]).decode()
    assert 'aerie_steps_total{model_name="org/name",rank="0"} 0.0' in page
    assert "folder" not in page
    assert "folder" in merge([rank.serialize(), serving, ServingMetrics(model_name="other").serialize()]).decode()


def test_metrics_page_has_the_vllm_speculation_metrics() -> None:
    page = series(merge([engine(0, STEP).serialize(), engine(1, STEP).serialize()]))
    for rank in "01":
        labels = (("engine", rank),)
        assert page["vllm:spec_decode_num_drafts_total", labels] == 8
        assert page["vllm:spec_decode_num_draft_tokens_total", labels] == 184
        assert page["vllm:spec_decode_num_accepted_tokens_total", labels] == 16
        assert page["vllm:generation_tokens_total", labels] == 24
        assert page["vllm:num_requests_running", labels] == 8
        for depth, count in enumerate(STEP.accepted_by_depth):
            label = (*labels, ("position", str(depth)))
            assert page["vllm:spec_decode_num_accepted_tokens_per_pos_total", label] == count


def test_metrics_page_has_no_created_series() -> None:
    """`vllm bench serve` adds the last word of every line that starts with a series' name."""
    page = merge([engine(0, STEP).serialize(), engine(0, STEP).serialize()]).decode()
    assert "_created" not in page
    drafts = [line for line in page.splitlines() if line.startswith("vllm:spec_decode_num_drafts")]
    assert sum(int(float(line.split()[-1])) for line in drafts) == 16


def test_merged_kv_usage_is_a_ratio_of_page_sums() -> None:
    small = engine(0, StepStats(status=EngineStatus(pages_free=10)))
    large = engine(0, StepStats(status=EngineStatus(pages_used=20, pages_cached=10)))
    page = series(merge([small.serialize(), large.serialize()]))
    assert page["vllm:kv_cache_usage_perc", (("engine", "0"),)] == 0.5


def test_every_vllm_name_has_a_source_metric() -> None:
    page = (
        json.loads(engine(0).serialize())["families"]
        + json.loads(ServingMetrics(model_name="m").serialize())["families"]
    )
    assert set(VLLM_NAMES) <= {family[0] for family in page}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (b'{"schema":0,"families":[]}', "schema 0"),
        (b'{"families":[]}', "schema None"),
        (
            b'{"schema":1,"families":[["aerie_steps","gauge","x",[]]]}',
            "'aerie_steps' is declared as counter and as gauge",
        ),
        (b"\x80\x04N.", "codec"),
    ],
)
def test_merge_refuses_samples_of_wrong_schema_kind_or_encoding(sample: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge([engine(0).serialize(), sample])


def test_merge_of_no_samples_is_an_empty_page() -> None:
    assert merge([]) == b""


def test_serving_metrics_count_rank_losses_and_gang_restarts() -> None:
    metrics = ServingMetrics(model_name="m")
    metrics.on_loss(1, "died")
    metrics.on_loss(1, "died")
    metrics.on_restart(2.5)
    metrics.on_resumed()
    page = merge([metrics.serialize()]).decode()
    assert 'aerie_rank_losses_total{kind="died",model_name="m",rank="1"} 2.0' in page
    assert 'aerie_gang_restarts_total{model_name="m"} 1.0' in page
    assert 'aerie_gang_restart_seconds_sum{model_name="m"} 2.5' in page
    assert 'aerie_resumed_streams_total{model_name="m"} 1.0' in page


def test_metric_series_exist_before_their_first_event() -> None:
    """`increase()` of a series whose first value is 1 is 0, so an alert on the series would never fire."""
    metrics = ServingMetrics(model_name="m")
    metrics.expect_ranks(3)
    metrics.expect_routes(["/health", "other"])
    page = series(merge([metrics.serialize(), EngineMetrics(model_name="m", depths=4).serialize()]))
    assert get_args(LossKind) == LOSS_KINDS
    expected = [("aerie_rank_losses_total", {"rank": str(r), "kind": k}) for r in range(3) for k in LOSS_KINDS]
    expected += [("aerie_requests_total", {"outcome": outcome}) for outcome in OUTCOMES]
    expected += [
        ("aerie_http_responses_total", {"route": route, "status": str(status)})
        for route in ("/health", "other")
        for status in STATUSES
    ]
    expected += [("aerie_accepted_by_depth_total", {"rank": "0", "depth": str(d)}) for d in (1, 2, 3, 4)]
    expected += [(f"aerie_{name}_total", {}) for name in ("gang_restarts", "resumed_streams")]
    assert {name: page[name, tuple(sorted(labels.items()))] for name, labels in expected} == {
        name: 0 for name, _ in expected
    }
    metrics.on_loss(2, "frozen")
    metrics.on_response("/health", 503)
    page = series(merge([metrics.serialize()]))
    assert page["aerie_rank_losses_total", (("kind", "frozen"), ("rank", "2"))] == 1
    assert page["aerie_http_responses_total", (("route", "/health"), ("status", "503"))] == 1


def test_merge_reports_build_info_once_and_adds_process_metrics() -> None:
    replicas = [ServingMetrics(model_name="m").serialize() for _ in range(2)]
    page = series(merge([*replicas, engine(0).serialize(), engine(1).serialize()]))
    (build,) = [(dict(labels), value) for (name, labels), value in page.items() if name == "aerie_build_info"]
    assert build[1] == 1
    assert set(build[0]) == {"version", "torch", "ray", "python"} and all(build[0].values())
    for labels in ({"process": "replica", "rank": ""}, {"process": "rank", "rank": "1"}):
        key = tuple(sorted(labels.items()))
        assert page["process_resident_memory_bytes", key] > 1 << 20
        assert page["process_cpu_seconds_total", key] > 0
        assert time.time() - 86400 * 365 < page["process_start_time_seconds", key] <= time.time() + 1
    open_files = page["process_open_fds", (("process", "replica"), ("rank", ""))]
    assert open_files >= 2 * 3, "the sum over two replicas, each with three standard files"
