"""From records to the report: `vllm bench serve`'s keys and definitions, so that its notebooks read ours.

TTFT: sending to first chunk with content. E2EL: sending to last chunk. TPOT: (E2EL - TTFT) / (output tokens - 1), so
without the first token. ITL: between successive chunks of any number of tokens. Milliseconds in the
report. Input and output tokens are the server's own counts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from troupellm.load_tests.client.records import RequestRecord

METRICS = ("ttft", "tpot", "itl", "e2el")
QUEUE_METRICS = ("client_queue_time", "e2el_including_client_queue")
"""Of the wait for --max-concurrency; reported where they are asked for."""


def percentile_word(percentile: float) -> str:
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def build_report(
    records: Sequence[RequestRecord],
    start: float,
    duration: float,
    *,
    percentiles: Sequence[float] = (99.0,),
    selected: Sequence[str] = METRICS,
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Args:
    start: when the run began, on the records' clock.
    duration: seconds from there to the last reply.
    goodput: milliseconds that a request must keep to count, by metric.
    """
    good = [record for record in records if record.ok]
    input_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    report: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(meets(record, goodput) for record in good) / duration if goodput else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(good, start),
        "max_concurrent_requests": peak_concurrency(records),
    }
    for metric in selected:
        report.update(summary(metric, [1000.0 * value for value in values_of(metric, good)], percentiles))
    return report


def values_of(metric: str, records: Sequence[RequestRecord]) -> list[float]:
    """Seconds: one per request, or one per gap for ITL."""
    match metric:
        case "ttft":
            return [record.ttft for record in records]
        case "tpot":
            return [value for record in records if (value := record.tpot) is not None]
        case "itl":
            return [gap for record in records for gap in record.itls]
        case "e2el":
            return [record.latency for record in records]
        case "client_queue_time":
            return [record.queue_time for record in records]
        case "e2el_including_client_queue":
            return [record.queue_time + record.latency for record in records]
        case _:
            raise ValueError(f"unknown metric {metric}")


def summary(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, std and percentiles of milliseconds under vLLM's keys; zeros when there is nothing to measure."""
    import numpy as np

    data = np.asarray(values or [0.0], dtype=np.float64)
    result = {
        f"mean_{metric}_ms": float(data.mean()),
        f"median_{metric}_ms": float(np.median(data)),
        f"std_{metric}_ms": float(data.std()),
    }
    for percentile in percentiles:
        result[f"{percentile_word(percentile)}_{metric}_ms"] = float(np.percentile(data, percentile))
    return result


def meets(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    """Whether a request kept every limit (milliseconds); one without a second token has no TPOT to miss."""
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(measured[metric] * 1000.0 <= limit for metric, limit in goodput.items())


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests in flight at once; one that ends when another starts does not overlap it."""
    edges = [(record.sent, 1) for record in records if record.sent]
    edges += [(max(record.ended, record.sent), -1) for record in records if record.sent]
    peak = running = 0
    for _, change in sorted(edges):
        running += change
        peak = max(peak, running)
    return peak


def peak_tokens_per_second(records: Sequence[RequestRecord], start: float) -> float:
    """Most output tokens in one of the run's whole seconds; tokens are spread evenly over chunks of unknown size."""
    seconds: dict[int, float] = {}
    for record in records:
        counts: Sequence[float] = record.chunk_tokens
        if len(counts) != len(record.chunk_times):
            counts = [record.output_tokens / len(record.chunk_times)] * len(record.chunk_times)
        for time, tokens in zip(record.chunk_times, counts, strict=True):
            second = math.floor(time - start)
            seconds[second] = seconds.get(second, 0.0) + tokens
    return max(seconds.values(), default=0.0)


def client_section(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """How well the load generator itself did, and what happened to the failures. Not among vLLM's keys."""
    import numpy as np

    good = [record for record in records if record.ok]
    sent = [record for record in records if record.sent]
    lateness = np.asarray([1000.0 * (record.released - record.scheduled) for record in sent] or [0.0])
    chunks = sum(len(record.chunk_times) for record in good)
    failures: dict[str, int] = {}
    for record in records:
        if record.error:
            failures[record.error] = failures.get(record.error, 0) + 1
    return {
        "mean_lateness_ms": float(lateness.mean()),
        "p99_lateness_ms": float(np.percentile(lateness, 99)),
        "max_lateness_ms": float(lateness.max()),
        "chunks": chunks,
        "mean_tokens_per_chunk": sum(record.output_tokens for record in good) / chunks if chunks else 0.0,
        "tokens_per_chunk_exact": all(len(record.chunk_tokens) == len(record.chunk_times) for record in good),
        "short_streams": sum(record.error.startswith("short stream") for record in records),
        "failures": failures,
    }


def details(records: Sequence[RequestRecord], start: float) -> dict[str, list[Any]]:
    """One entry per request, failed ones included (zeros and the error text). Seconds."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens if record.ok else 0 for record in records],
        "ttfts": [record.ttft if record.ok else 0.0 for record in records],
        "itls": [record.itls if record.ok else [] for record in records],
        "latencies": [record.latency if record.ok else 0.0 for record in records],
        "start_times": [record.sent - start if record.sent else 0.0 for record in records],
        "queue_times": [record.queue_time if record.sent else 0.0 for record in records],
        "generated_texts": [record.text for record in records],
        "tokens_per_chunk": [record.chunk_tokens for record in records],
        "errors": [record.error for record in records],
    }
