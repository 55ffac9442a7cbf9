"""Metrics as values, with vLLM's names for `LLM.get_metrics`."""

from collections.abc import Iterator

import msgspec
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "vllm:"
_POSITION = "position"
"""Label of the entries of a vector."""


class Counter(msgspec.Struct, frozen=True):
    name: str
    """Without `_total`."""
    labels: dict[str, str]
    value: int


class Gauge(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str]
    value: float


class Vector(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str]
    values: list[int]
    """Counts by position."""


class Histogram(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]
    """Cumulative counts by upper bound; the last bound is `+Inf`."""


Metric = Counter | Gauge | Vector | Histogram


def read_metrics(text: str) -> list[Metric]:
    """The metrics with vLLM's names.

    Args:
        text: in Prometheus' text format.
    """
    families = text_string_to_metric_families(text)
    return [metric for family in families if family.name.startswith(PREFIX) for metric in _metrics(family)]


def _metrics(family: Family) -> Iterator[Metric]:
    groups: dict[tuple[tuple[str, str], ...], list[tuple[str, str, float]]] = {}
    for sample in family.samples:
        bound = sample.labels.get("le", sample.labels.get(_POSITION, ""))
        labels = tuple((key, value) for key, value in sample.labels.items() if key not in ("le", _POSITION))
        groups.setdefault(labels, []).append((sample.name.removeprefix(family.name), bound, sample.value))
    for labels, samples in groups.items():
        match family.type:
            case "histogram":
                yield _histogram(family.name, dict(labels), samples)
            case "counter":
                counts = [(bound, int(value)) for ending, bound, value in samples if ending != "_created"]
                if counts and counts[0][0]:
                    ordered = sorted(counts, key=lambda count: int(count[0]))
                    yield Vector(family.name, dict(labels), [value for _, value in ordered])
                else:
                    yield from (Counter(family.name, dict(labels), value) for _, value in counts)
            case "gauge":
                yield from (Gauge(family.name, dict(labels), value) for _, _, value in samples)


def _histogram(name: str, labels: dict[str, str], samples: list[tuple[str, str, float]]) -> Histogram:
    ends = {ending: value for ending, _, value in samples}
    return Histogram(
        name=name,
        labels=labels,
        count=int(ends.get("_count", 0)),
        sum=ends.get("_sum", 0.0),
        buckets={bound: int(value) for ending, bound, value in samples if ending == "_bucket"},
    )
