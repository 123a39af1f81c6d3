"""The stages of a request, as vLLM counts them: queued, in prefill, decoding."""

from cluster.engine.request_times import RequestTimes
from cluster.observability.exposition import merge
from cluster.observability.metrics import EngineMetrics


def test_request_stage_metrics_match_the_stages_of_vllm() -> None:
    metrics = EngineMetrics(model_name="m", rank=1)
    times = RequestTimes(queued=10.0)
    times.admit(11.0)
    for now in (13.0, 15.0, 19.0):  # the steps that gave it tokens
        times.record_tokens(now)
    times.finish(metrics, "stop")
    one = RequestTimes(queued=10.0)
    one.admit(11.0)
    one.finish(metrics, "abort")
    page = merge([metrics.serialize()]).decode()
    own, model = 'engine="1"', 'model_name="m"'
    for line in (
        f'vllm:request_success_total{{{own},finished_reason="stop",{model}}} 1.0',
        f'vllm:request_success_total{{{own},finished_reason="abort",{model}}} 1.0',
        f'vllm:request_success_total{{{own},finished_reason="length",{model}}} 0.0',
        f"vllm:request_queue_time_seconds_sum{{{own},{model}}} 2.0",
        f"vllm:request_queue_time_seconds_count{{{own},{model}}} 2.0",
        f"vllm:request_prefill_time_seconds_sum{{{own},{model}}} 2.0",
        f"vllm:request_prefill_time_seconds_count{{{own},{model}}} 1.0",
        f"vllm:request_decode_time_seconds_sum{{{own},{model}}} 6.0",
        f"vllm:request_decode_time_seconds_count{{{own},{model}}} 1.0",
    ):
        assert line in page, page
