"""The large parts of a worker, weights and KV cache, which sleep frees and waking takes again."""

from collections.abc import Callable
from time import perf_counter
from typing import Generic, TypeVar

from troupellm.models.worker.memory_use import give_back, resident_bytes
from troupellm.protocol.messages.sleep import EMPTY, SleepWorker, WakeWorker, WorkerReport
from troupellm.protocol.messages.worker import ProgressSink, WorkerReady

ModelT = TypeVar("ModelT")
CacheT = TypeVar("CacheT")
"""Not None; a model without a cache has an empty one."""


class Parts(Generic[ModelT, CacheT]):
    """Owns weights and KV cache. Other objects may keep references to them only as long as a runner lives."""

    def __init__(
        self, read: Callable[[ProgressSink], ModelT], make_cache: Callable[[], CacheT], decoder: ModelT | None = None
    ) -> None:
        """
        Args:
            read: reads the weights, the same ones every time.
            make_cache: reserves the cache, of the same size every time.
            decoder: the weights, if they were read.
        """
        self._read = read
        self._make_cache = make_cache
        self._decoder = decoder
        self._cache: CacheT | None = None

    @property
    def decoder(self) -> ModelT:
        assert self._decoder is not None, "the weights were given back"
        return self._decoder

    @property
    def cache(self) -> CacheT:
        assert self._cache is not None, "the KV cache was given back"
        return self._cache

    @property
    def complete(self) -> bool:
        return self._decoder is not None and self._cache is not None

    def read(self, progress: ProgressSink) -> ModelT:
        """The weights, which are read if they are not there.

        Raises:
            ModelLoadError: they cannot be read.
        """
        if self._decoder is None:
            self._decoder = self._read(progress)
        return self._decoder

    def reserve(self) -> CacheT:
        """The cache, empty if it was not there."""
        if self._cache is None:
            self._cache = self._make_cache()
        return self._cache

    def sleep(self, command: SleepWorker) -> WorkerReport:
        """Drop the parts that the level names, which must have no other reference; measure memory before and after."""
        begin, before = perf_counter(), resident_bytes()
        self._cache = None
        if command.level >= EMPTY:
            self._decoder = None
        give_back()
        return WorkerReport(rss_before=before, rss_after=resident_bytes(), seconds=perf_counter() - begin)

    def wake(
        self, command: WakeWorker, progress: ProgressSink, ready: Callable[[], WorkerReady | None]
    ) -> WorkerReport:
        """Take back the parts that the command names.

        Args:
            ready: called last; makes the worker's report once nothing is missing.

        Raises:
            ModelLoadError: the weights cannot be read any more.
        """
        begin, before = perf_counter(), resident_bytes()
        if command.weights:
            self.read(progress)
        if command.kv_cache:
            self.reserve()
        answer = ready()
        seconds = perf_counter() - begin
        return WorkerReport(rss_before=before, rss_after=resident_bytes(), seconds=seconds, ready=answer)
