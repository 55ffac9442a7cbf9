"""The text of `/metrics`: the store's counters, and gauges read from the live snapshot at the moment of the scrape.

Every family has a name of ours; those that vLLM has too are repeated under its exact name when asked.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric

from troupellm.actors.metrics import tables, tier_tables
from troupellm.actors.metrics.actor import MetricsStore
from troupellm.actors.metrics.families import families, gauge, text_of
from troupellm.protocol.messages.snapshot import EngineSnapshot


class Exposition:
    """The metrics of one engine."""

    def __init__(
        self,
        store: MetricsStore,
        snapshot: Callable[[], EngineSnapshot],
        cache_config: Mapping[str, str],
        engine: int = 0,
    ) -> None:
        """engine: its number among those that a balancer or a fleet has."""
        self._engine = str(engine)
        self._store = store
        self._snapshot = snapshot
        settings = {tuple(cache_config.values()): 1.0}
        labels = " ".join(cache_config)
        self._config = gauge(
            "cache_config_info", "KV cache settings.", lambda _: settings, labels, vllm="cache_config_info"
        )

    def text(self, *, compat: bool) -> bytes:
        """Prometheus' text format."""
        return text_of(self._families(compat=compat))

    def _families(self, *, compat: bool) -> Iterator[Metric]:
        snapshot = self._snapshot()
        scheduler = snapshot.scheduler
        base = {"model_name": snapshot.model, "engine": self._engine}
        for table, source in (
            (tables.STORE, self._store),
            (tables.ENGINE, snapshot),
            ((self._config,), snapshot),
            (tables.ACTORS, snapshot.actors),
            (tables.TENANTS, snapshot.tenants or None),
            (tables.GUIDE, snapshot.guide),
            (tables.MEDIA, snapshot.media),
            (tables.ENCODERS, scheduler.encoders),
            (tables.ADAPTERS, scheduler.adapters),
            (tables.STATES, scheduler.states),
            (tables.KV_EVENTS, snapshot.kv_events),
            (tier_tables.OFFLOAD, scheduler.offload),
            (tier_tables.LEASES, scheduler.leases if scheduler.leases.budget else None),
            (tables.PROPOSER, scheduler.proposer),
            (tables.GRAPHS, scheduler.graphs),
        ):
            if source is not None:
                yield from families(table, source, base, compat=compat)
