"""How many responses are kept, for `/metrics`."""

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

REASONS = ("expired", "entries", "bytes")


class StoreCounts(msgspec.Struct, frozen=True, kw_only=True):
    stored: int
    bytes: int
    running: int
    """In the background, in all processes."""
    evicted: dict[str, int]
    """By reason, since the database was made."""


def store_metrics(counts: StoreCounts, errors: int) -> bytes:
    """Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StoreCollector(counts, errors))
    return generate_latest(registry)


class _StoreCollector(Collector):
    def __init__(self, counts: StoreCounts, errors: int) -> None:
        self._counts = counts
        self._errors = errors

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        yield GaugeMetricFamily("troupellm_responses_stored", "Responses that are kept.", counts.stored)
        yield GaugeMetricFamily("troupellm_responses_stored_bytes", "Bytes of these.", counts.bytes)
        yield GaugeMetricFamily("troupellm_responses_background", "Background responses that run.", counts.running)
        evicted = CounterMetricFamily("troupellm_responses_evicted", "Responses not kept any more.", labels=["reason"])
        for reason in REASONS:
            evicted.add_metric([reason], counts.evicted.get(reason, 0))
        yield evicted
        yield CounterMetricFamily("troupellm_responses_store_errors", "Failures to write or read.", self._errors)
