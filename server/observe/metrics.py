"""How many requests were answered, by method, route and status: for `/metrics`, and to be added up over processes."""

from collections import Counter
from collections.abc import Iterable

from troupellm.actors.metrics.families import counter, families, gauge, text_of
from troupellm.protocol.wire.api_process import HttpCount

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNMATCHED = "unmatched"
"""Stands for every path that is no route: clients make up as many as they like."""


class HttpCounts:
    """The answers of this process, probes included."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._fresh: Counter[tuple[str, str, int]] = Counter()

    def count(self, method: str, route: str, status: int) -> None:
        self._fresh[method if method in METHODS else "other", route, status] += 1

    def take(self) -> tuple[HttpCount, ...]:
        """The counts since the last call."""
        fresh, self._fresh = self._fresh, Counter()
        self._counts.update(fresh)
        return tuple(HttpCount(*key, number) for key, number in fresh.items())

    def add(self, counts: Iterable[HttpCount]) -> None:
        """Add the counts of another process."""
        for entry in counts:
            self._counts[entry.method, entry.route, entry.status] += entry.number

    def text(self, in_flight: int) -> bytes:
        """Prometheus' text format."""
        self.take()
        answered = {(method, route, str(status)): n for (method, route, status), n in sorted(self._counts.items())}
        table = (
            counter("http_requests", "Requests answered.", lambda _: answered, "method route status"),
            gauge("http_requests_in_flight", "Requests that use the engine.", lambda _: in_flight),
        )
        return text_of(families(table, self))
