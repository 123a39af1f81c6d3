"""The stages of a request, as vLLM counts them: queued, in prefill, decoding."""

from cluster.engine.request_times import RequestTimes
from cluster.observability.exposition import merge
from cluster.observability.metrics import EngineMetrics


def test_request_stage_metrics_match_the_stages_of_vllm() -> None:
    metrics = EngineMetrics(model_name="m", rank=1)
    finished_times = RequestTimes(queued=10.0)
    finished_times.admit(11.0)
    for now in (13.0, 15.0, 19.0):  # the end times of the steps that gave the request tokens
        finished_times.record_tokens(now)
    finished_times.finish(metrics, "stop")
    aborted_times = RequestTimes(queued=10.0)
    aborted_times.admit(11.0)
    aborted_times.finish(metrics, "abort")
    page = merge([metrics.serialize()]).decode()
    engine_label, model_label = 'engine="1"', 'model_name="m"'
    for line in (
        f'vllm:request_success_total{{{engine_label},finished_reason="stop",{model_label}}} 1.0',
        f'vllm:request_success_total{{{engine_label},finished_reason="abort",{model_label}}} 1.0',
        f'vllm:request_success_total{{{engine_label},finished_reason="length",{model_label}}} 0.0',
        f"vllm:request_queue_time_seconds_sum{{{engine_label},{model_label}}} 2.0",
        f"vllm:request_queue_time_seconds_count{{{engine_label},{model_label}}} 2.0",
        f"vllm:request_prefill_time_seconds_sum{{{engine_label},{model_label}}} 2.0",
        f"vllm:request_prefill_time_seconds_count{{{engine_label},{model_label}}} 1.0",
        f"vllm:request_decode_time_seconds_sum{{{engine_label},{model_label}}} 6.0",
        f"vllm:request_decode_time_seconds_count{{{engine_label},{model_label}}} 1.0",
    ):
        assert line in page, page
