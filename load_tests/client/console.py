"""The table that `vllm bench serve` prints, line for line, and what only we know below it."""

from collections.abc import Mapping, Sequence
from typing import Any

from troupellm.load_tests.client.metrics import percentile_word

WIDTH = 50
_TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client-side Queueing", "Client Queue Time"),
    "e2el_including_client_queue": ("Queue-inclusive End-to-end Latency", "E2EL incl. Client Queue"),
}


def table(report: Mapping[str, Any], selected: Sequence[str], percentiles: Sequence[float]) -> str:
    lines = [_title("Serving Benchmark Result", "=")]
    lines.append(_line("Successful requests:", report["completed"]))
    lines.append(_line("Failed requests:", report["failed"]))
    if report["max_concurrency"] is not None:
        lines.append(_line("Maximum request concurrency:", report["max_concurrency"]))
    if report["request_rate"] != "inf":
        lines.append(_line("Request rate configured (RPS):", float(report["request_rate"])))
    lines.append(_line("Benchmark duration (s):", report["duration"]))
    lines.append(_line("Total input tokens:", report["total_input_tokens"]))
    lines.append(_line("Total generated tokens:", report["total_output_tokens"]))
    lines.append(_line("Request throughput (req/s):", report["request_throughput"]))
    if report["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", report["request_goodput"]))
    lines.append(_line("Output token throughput (tok/s):", report["output_throughput"]))
    lines.append(_line("Peak output token throughput (tok/s):", report["max_output_tokens_per_s"]))
    lines.append(_line("Peak concurrent requests:", report["max_concurrent_requests"]))
    lines.append(_line("Total token throughput (tok/s):", report["total_token_throughput"]))
    for metric in selected:
        title, short = _TITLES[metric]
        lines.append(_title(title, "-"))
        lines.append(_line(f"Mean {short} (ms):", report[f"mean_{metric}_ms"]))
        lines.append(_line(f"Median {short} (ms):", report[f"median_{metric}_ms"]))
        for percentile in percentiles:
            word = percentile_word(percentile)
            lines.append(_line(f"{word.upper()} {short} (ms):", report[f"{word}_{metric}_ms"]))
    lines.append(_title("Load generator", "-"))
    client = report["client"]
    lines.append(_line("Mean tokens per chunk:", client["mean_tokens_per_chunk"]))
    lines.append(_line("P99 lateness of the client (ms):", client["p99_lateness_ms"]))
    lines.append(_line("Worst lateness of the client (ms):", client["max_lateness_ms"]))
    lines.append("=" * WIDTH)
    lines += [f"{times} x {error}" for error, times in list(client["failures"].items())[:10]]
    return "\n".join(lines)


def _title(text: str, fill: str) -> str:
    return f" {text} ".center(WIDTH, fill) if fill == "=" else text.center(WIDTH, fill)


def _line(name: str, value: float) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"
