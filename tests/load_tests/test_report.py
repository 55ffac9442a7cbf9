"""The report's arithmetic on records made by hand, and the schedules."""

import itertools
import math
from typing import Any

import pytest

from troupellm.load_tests.client import arrivals, console, metrics, page
from troupellm.load_tests.client.records import RequestRecord

VLLM_KEYS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
}  # fmt: skip
STATISTICS = ("mean", "median", "std", "p99")
VLLM_DETAILS = {
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts",
    "errors",
}  # fmt: skip


def record(index: int, sent: float, chunks: list[float], *, output: int, prompt: int = 10, error: str = "") -> Any:
    return RequestRecord(
        index=index,
        wanted_tokens=output,
        scheduled=sent - 0.25,
        released=sent - 0.125,
        sent=sent,
        ended=chunks[-1],
        chunk_times=chunks,
        answered=chunks[-1],
        prompt_tokens=prompt,
        output_tokens=output,
        pieces=["x"],
        error=error,
    )


RECORDS = [
    record(0, 100.0, [100.5, 101.0, 101.5], output=5),
    record(1, 100.0, [101.0, 103.0], output=2),
    record(2, 102.0, [102.25], output=1),
    record(3, 100.0, [100.5], output=0, error="short stream: no finish reason"),
]


def build(**settings: Any) -> dict[str, Any]:
    return metrics.build_report(RECORDS, 100.0, 4.0, **settings)


def test_the_wait_of_the_client_is_reported_where_it_is_asked_for() -> None:
    names = ("client_queue_time", "e2el_including_client_queue")
    report = build(selected=names)
    assert report["mean_client_queue_time_ms"] == report["p99_client_queue_time_ms"] == 250.0
    assert report["median_e2el_including_client_queue_ms"] == 1500.0 + 250.0
    assert "mean_ttft_ms" not in report
    shown = {**report, "max_concurrency": None, "request_rate": "inf", "client": metrics.client_section(RECORDS)}
    assert f"{'Mean Client Queue Time (ms):':<40} 250.00" in console.table(shown, names, (99.0,))


def test_no_two_percentiles_share_a_key() -> None:
    assert [metrics.percentile_word(value) for value in (50.0, 99.9, 99.99999)] == ["p50", "p99.9", "p99.99999"]


def test_keys_are_those_of_vllm() -> None:
    report = build()
    latencies = {f"{name}_{metric}_ms" for name in STATISTICS for metric in ("ttft", "tpot", "itl", "e2el")}
    assert set(report) == VLLM_KEYS | latencies
    assert set(metrics.details(RECORDS, 100.0)) == VLLM_DETAILS | {"tokens_per_chunk"}


def test_throughput_counts_successes_only() -> None:
    report = build()
    assert (report["completed"], report["failed"]) == (3, 1)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (30, 8)
    assert report["request_throughput"] == 0.75
    assert report["output_throughput"] == 2.0
    assert report["total_token_throughput"] == 9.5
    assert report["request_goodput"] is None


def test_latencies_and_exact_percentiles() -> None:
    report = build(percentiles=(50.0, 75.0, 99.9))
    assert report["mean_ttft_ms"] == pytest.approx((500 + 1000 + 250) / 3)
    assert report["median_ttft_ms"] == report["p50_ttft_ms"] == 500.0
    assert report["p75_ttft_ms"] == 750.0  # half way between 500 and 1000
    assert report["p99.9_ttft_ms"] == pytest.approx(500 + 500 * 0.998)
    # (1.5 - 0.5) / 4 and (3 - 1) / 1; the answer of one token has none
    assert report["mean_tpot_ms"] == pytest.approx((250 + 2000) / 2)
    assert report["mean_itl_ms"] == pytest.approx((500 + 500 + 2000) / 3)
    assert report["std_itl_ms"] == pytest.approx(math.sqrt(2) * 500)
    assert report["median_e2el_ms"] == 1500.0


def test_goodput_needs_every_limit() -> None:
    assert build(goodput={"ttft": 500.0})["request_goodput"] == 2 / 4.0
    assert build(goodput={"ttft": 500.0, "e2el": 1000.0})["request_goodput"] == 1 / 4.0
    assert build(goodput={"tpot": 249.0})["request_goodput"] == 1 / 4.0  # one token has no TPOT to miss


def test_peaks_are_those_of_the_fullest_second() -> None:
    report = build()
    assert report["max_concurrent_requests"] == 3
    # second 1 holds two thirds of the first answer and half of the second
    assert report["max_output_tokens_per_s"] == pytest.approx(5 * 2 / 3 + 1)
    exact = record(0, 100.0, [100.5, 101.5], output=5)
    exact.chunk_tokens = [4, 1]
    assert metrics.peak_tokens_per_second([exact], 100.0) == 4


def test_a_run_without_success_has_zeros() -> None:
    report = metrics.build_report(RECORDS[3:], 100.0, 1.0, goodput={"ttft": 1.0})
    assert report["completed"] == report["mean_ttft_ms"] == report["p99_e2el_ms"] == report["request_goodput"] == 0


def test_details_keep_one_entry_per_request() -> None:
    details = metrics.details(RECORDS, 100.0)
    assert details["start_times"] == [0.0, 0.0, 2.0, 0.0]
    assert details["queue_times"] == [0.25] * 4
    assert details["ttfts"] == [0.5, 1.0, 0.25, 0.0]
    assert details["itls"] == [[0.5, 0.5], [2.0], [], []]
    assert details["errors"][3].startswith("short stream")


def test_client_section_tells_lateness_and_failures() -> None:
    client = metrics.client_section(RECORDS)
    assert client["max_lateness_ms"] == 125.0
    assert client["mean_tokens_per_chunk"] == pytest.approx(8 / 6)
    assert client["short_streams"] == 1
    assert client["failures"] == {"short stream: no finish reason": 1}


def full_report() -> dict[str, Any]:
    head = {"model_id": "m<1>", "request_rate": "inf", "max_concurrency": None}
    return {**head, **build(goodput={"ttft": 500.0}), "client": metrics.client_section(RECORDS)}


def test_table_has_vllm_lines() -> None:
    lines = console.table(full_report(), metrics.METRICS, (99.0,)).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     3         " in lines
    assert "Output token throughput (tok/s):         2.00      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "P99 E2EL (ms):                           2970.00   " in lines


def test_page_is_self_contained() -> None:
    text = page.render(full_report(), RECORDS, 100.0, {"ttft": 500.0})
    assert text.count("<svg") == 4
    assert "m&lt;1&gt;" in text
    for outside in ("<script", "<link", "<img", "@import", 'href="http'):
        assert outside not in text


def test_constant_load_ends_on_time() -> None:
    times = arrivals.arrival_times(50, 10.0, seed=1)
    assert times[-1] == pytest.approx(5.0)
    assert times == sorted(times)
    assert times == arrivals.arrival_times(50, 10.0, seed=1)
    assert times != arrivals.arrival_times(50, 10.0, seed=2)
    assert arrivals.arrival_times(3, math.inf) == [0.0, 0.0, 0.0]


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_burstiness_spreads_the_gaps() -> None:
    def spread(burstiness: float) -> float:
        values = gaps(arrivals.arrival_times(4000, 1.0, burstiness=burstiness))
        mean = sum(values) / len(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean

    assert spread(1.0) == pytest.approx(1.0, rel=0.1)  # exponential gaps
    assert spread(100.0) == pytest.approx(0.1, rel=0.1)
    assert spread(0.25) == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("shape", ["linear", "exponential"])
def test_ramps_go_from_start_to_end_rate(shape: Any) -> None:
    regular = {"burstiness": 1e9, "ramp_up": shape, "start_rps": 1.0, "end_rps": 16.0}
    rates = [1 / gap for gap in gaps(arrivals.arrival_times(5, math.inf, **regular))]
    expected = [4.75, 8.5, 12.25, 16.0] if shape == "linear" else [2.0, 4.0, 8.0, 16.0]
    assert rates == pytest.approx(expected, rel=1e-3)
