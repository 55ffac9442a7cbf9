"""Metrics as `LLM.get_metrics` gives them."""

from pathlib import Path
from typing import Any

from troupellm import LLM, SamplingParams
from troupellm.actors.metrics.metric_reader import Counter, Gauge, Histogram, Vector, read_metrics

TEXT = """
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="m"} 7.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 2.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="10"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="9"} 4.0
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="1.0",model_name="m"} 1.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf",model_name="m"} 3.0
vllm:e2e_request_latency_seconds_count{model_name="m"} 3.0
vllm:e2e_request_latency_seconds_sum{model_name="m"} 4.5
# TYPE troupellm_other gauge
troupellm_other 1.0
"""


def test_every_kind_of_metric_is_read() -> None:
    labels = {"model_name": "m"}
    assert read_metrics(TEXT) == [
        Counter("vllm:prompt_tokens", labels, 7),
        Gauge("vllm:num_requests_running", labels, 2.0),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, [4, 1]),
        Histogram("vllm:e2e_request_latency_seconds", labels, 3, 4.5, {"1.0": 1, "+Inf": 3}),
    ]


def test_an_llm_gives_its_metrics(model_folder: Path, fake_worker: Any) -> None:
    with LLM(model_folder, worker=lambda folder: fake_worker) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4), use_tqdm=False)
        counts = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
        assert (counts["vllm:prompt_tokens"], counts["vllm:generation_tokens"]) == (3, 4)
