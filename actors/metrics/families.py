"""Families of `/metrics` as rows of tables: kind, names, help text, and the value that is read at the scrape."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from troupellm.actors.metrics.actor import Histogram

Kind = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
Value = float | Histogram | Mapping[Any, float] | Mapping[Any, Histogram] | None


class Family(msgspec.Struct, frozen=True):
    """A row of a table."""

    kind: Kind
    name: str
    """Without `troupellm_`."""
    text: str
    value: str | Callable[[Any], Value]
    """An attribute of the table's source, or a function of the source. With labels, a mapping from a label's value, or
    a tuple of several ones, to numbers. None: there is no such family now."""
    labels: str = ""
    """Names, separated by spaces."""
    vllm: str = ""
    """The name that vLLM has for it, without `vllm:`."""


counter = partial(Family, CounterMetricFamily)
gauge = partial(Family, GaugeMetricFamily)
histogram = partial(Family, HistogramMetricFamily)


def families(
    table: Iterable[Family], source: object, base: Mapping[str, str] | None = None, *, compat: bool = False
) -> Iterator[Metric]:
    """
    Args:
        base: labels of all samples.
        compat: repeat families under vLLM's names.
    """
    base = base or {}
    for row in table:
        value = attrgetter(row.value)(source) if isinstance(row.value, str) else row.value(source)
        if value is None:
            continue
        labels = row.labels.split()
        family = row.kind(f"troupellm_{row.name}", row.text, labels=[*base, *labels])
        for key, amount in (value if isinstance(value, Mapping) else {(): value}).items():
            _add(family, [*base.values(), *((key,) if isinstance(key, str) else key)], amount)
        yield family
        if compat and row.vllm:
            yield _renamed(family, f"vllm:{row.vllm}")


def text_of(found: Iterable[Metric]) -> bytes:
    """Prometheus' text format."""
    return generate_latest(_Found(found))


class _Found(CollectorRegistry):
    def __init__(self, found: Iterable[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._found = found

    def collect(self) -> Iterator[Metric]:
        yield from self._found


def _add(
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily, labels: list[str], amount: Any
) -> None:
    if isinstance(family, HistogramMetricFamily):
        ends = [*map(str, amount.bounds), "+Inf"]
        family.add_metric(labels, list(zip(ends, accumulate(amount.counts), strict=True)), amount.total)
    else:
        family.add_metric(labels, amount)


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    copy.samples = [sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples]
    return copy
