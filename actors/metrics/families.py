"""Families of `/metrics` out of numbers."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


def counter(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = CounterMetricFamily(f"troupellm_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counters(name: str, text: str, base: Mapping[str, str], label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"troupellm_{name}", text, labels=[*base, label])
    for key, value in values.items():
        family.add_metric([*base.values(), key], value)
    return family


def gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(f"troupellm_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
