"""Metrics of files and batches."""

import sqlite3
from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from troupellm.server.base.errors import HttpError
from troupellm.server.storage.batches import Store

STATUSES = (
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
)  # fmt: skip


class FolderCounts(msgspec.Struct, frozen=True):
    files: int = 0
    bytes: int = 0
    batches: dict[str, int] = {}
    waiting: int = 0
    """Lines of unfinished batches that have no answer."""
    counts: dict[str, int] = {}


class _Collector(Collector):
    def __init__(self, folder: FolderCounts, store: Store, uploads: int) -> None:
        self._folder = folder
        self._store = store
        self._uploads = uploads

    def collect(self) -> Iterator[Metric]:
        folder, config = self._folder, self._store.config
        yield GaugeMetricFamily("troupellm_files", "Files that are stored.", folder.files)
        yield GaugeMetricFamily("troupellm_files_bytes", "Bytes of files, and of answers to batches.", folder.bytes)
        yield GaugeMetricFamily("troupellm_files_limit_bytes", "Bytes that a key may have.", config.max_stored_bytes)
        yield GaugeMetricFamily("troupellm_files_uploading", "Uploads under way in this process.", self._uploads)
        yield CounterMetricFamily("troupellm_files_refused", "Files refused for want of room.", self._count("refused"))
        yield CounterMetricFamily("troupellm_files_errors", "Refusals of the disk.", self._store.errors)
        batches = GaugeMetricFamily("troupellm_batches", "Batches by status.", labels=["status"])
        for status in STATUSES:
            batches.add_metric([status], folder.batches.get(status, 0))
        yield batches
        yield GaugeMetricFamily("troupellm_batch_lines_waiting", "Lines without an answer.", folder.waiting)
        lines = CounterMetricFamily("troupellm_batch_lines", "Lines by what came of them.", labels=["result"])
        for result in ("completed", "failed"):
            lines.add_metric([result], self._count(result))
        yield lines

    def _count(self, name: str) -> int:
        return self._folder.counts.get(name, 0)


async def batch_metrics(store: Store, uploads: int) -> bytes:
    """Prometheus' text format."""
    try:
        folder = await store.read(_read)
    except HttpError:  # counted
        folder = FolderCounts()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(folder, store, uploads))
    return generate_latest(registry)


def _read(database: sqlite3.Connection) -> FolderCounts:
    (files,) = database.execute("SELECT count(*) FROM files").fetchone()
    (size,) = database.execute("SELECT coalesce(sum(bytes), 0) FROM usage").fetchone()
    (waiting,) = database.execute(
        "SELECT coalesce(sum(total - completed - failed), 0) FROM batches "
        "WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
    ).fetchone()
    batches = dict(database.execute("SELECT status, count(*) FROM batches GROUP BY status").fetchall())
    counts = dict(database.execute("SELECT name, number FROM counts").fetchall())
    return FolderCounts(files=files, bytes=size, batches=batches, waiting=waiting, counts=counts)
