"""Administration of an engine beside its requests: end requests, pause, sleep, and inspect."""

from collections.abc import AsyncIterator, Iterable

from troupellm.actors.engine.lifecycle import EngineLife
from troupellm.actors.kv_cache.events import KVEventLog
from troupellm.protocol.config.kv_hints import DropSession, KeepTurn, PrefetchReport, PrefetchSession
from troupellm.protocol.errors import InvalidRequest, RequestAborted
from troupellm.protocol.messages.kv_events import MOST_READ, KVEvent, KVEventsRead
from troupellm.protocol.messages.sleep import PauseMode, ProfileReport, SleepReport, StartProfile, StopProfile, WakeTag

MOST_PROFILED_STEPS = 1000
_SESSION_SECONDS = 10.0
"""That the scheduler may take to answer about a session."""


class EngineAdmin(EngineLife):
    """Part of `Engine`."""

    @property
    def is_paused(self) -> bool:
        return self._require().system.sleep_control.paused

    @property
    def is_sleeping(self) -> bool:
        """Not before the requests have finished that a sleep waits for."""
        return self._require().system.sleep_control.asleep

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Compute nothing from when this returns until `resume`. Requests that come meanwhile wait.

        Args:
            mode: what becomes of the open requests. abort: they end with RequestAborted; wait: they finish first; keep:
                they stand still, and go on afterwards with the same tokens.
            clear_cache: forget the prefix cache.

        Raises:
            Conflict: `resume` was called before all had finished, another call waits for that, or nothing can finish
                since the engine stands still already. Cancelling this call undoes it as well.
        """
        await self._on_loop().system.sleep_control.pause(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """
        Raises:
            Conflict: the engine sleeps; `wake` it.
        """
        self._on_loop().system.sleep_control.resume()

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> SleepReport:
        """Pause, and give memory back until `wake`: at level 0 none, at 1 the KV cache, at 2 the weights too.

        Requests that come meanwhile wait; those with `wait=False` are refused with EngineStopped, code `asleep`.

        Args:
            mode: as of `pause`; requests that are kept are computed again after the waking, with the same tokens.

        Returns:
            what the worker's process held before and after.

        Raises:
            Conflict: as of `pause`; what the engine slept at before it sleeps at still.
        """
        return await self._on_loop().system.sleep_control.sleep(level, mode)

    async def wake(self, tags: Iterable[WakeTag] | None = None) -> SleepReport:
        """Take back what the sleep gave, and go on unless the engine was paused.

        Args:
            tags: only these parts (weights, kv_cache, scheduling); the engine goes on when nothing is missing.

        Raises:
            ModelLoadError: the weights cannot be read any more; the engine sleeps on.
        """
        return await self._on_loop().system.sleep_control.wake(tags)

    async def abort(self, request_id: str) -> int:
        """End the open requests of that id, or of a call of that id; how many there were."""
        requests = self._on_loop().system.requests
        found = requests.named(request_id)
        for outbox in found:
            requests.end(outbox, RequestAborted("the request was ended by an administrator"), by="admin")
        return len(found)

    async def abort_all(self) -> int:
        """End all open requests; how many there were."""
        requests = self._on_loop().system.requests
        open_requests = len(requests)
        requests.end_all(lambda: RequestAborted("the request was ended by an administrator"), by="admin")
        return open_requests

    async def reset_prefix_cache(self, *, external: bool = False) -> bool:
        """Nothing that was computed so far is found by requests that come from now on; those that run go on.

        Host memory and disk forget their blocks, for later lives of this engine too.

        Args:
            external: so do stores that other engines share with this one, for these engines too.

        Returns:
            False: a store could not be reset so far, being out of order, or the engine sleeps. This engine does not use
            it before it has been, and tries once more when it is closed; if the store takes nothing until then, or the
            engine is killed or ends asleep, the next one finds the blocks. Of a paused engine that is not waited for:
            it does so when it goes on, or is closed.
        """
        seconds = 2 * self.config.offload.kv_offload_timeout
        return await self._on_loop().system.sleep_control.reset_cache(seconds, external=external)

    def keep_session(self, session: str, *, tenant: str = "") -> None:
        """The session's newest turn ended in tool calls: its KV blocks are leased for `tool_lease` seconds."""
        self._on_loop().system.sleep_control.send(KeepTurn(tenant, session))

    async def prefetch_session(self, session: str, *, tenant: str = "") -> PrefetchReport | None:
        """Bring the KV blocks of a session's last turns to the device, out of host memory and outer tiers.

        Returns:
            where its blocks were found; None: the tenant has no such session. It has one once a request with
            `hints=KVHints(session=...)` has ended, and until 1,024 others of the tenant were used.
        """
        return await self._on_loop().system.sleep_control.ask(
            lambda done: PrefetchSession(tenant, session, done), _SESSION_SECONDS
        )

    async def drop_session(self, session: str, *, tenant: str = "") -> int | None:
        """End a session: the blocks that only it has are evicted first.

        Returns:
            how many they are; None: the tenant has no such session.
        """
        return await self._on_loop().system.sleep_control.ask(
            lambda done: DropSession(tenant, session, done), _SESSION_SECONDS
        )

    def kv_events(self, after: int | None = None, *, snapshot: bool = False) -> AsyncIterator[KVEvent]:
        """Changes of KV blocks, until the engine ends, for routers. A reader that falls behind loses events and is told
        how many; `KVEvent.seq` says where it got to.

        Args:
            after: the number of the last event that is known already, 0 for all that are kept; None: from now on.
            snapshot: begin with what can be found now, and do so again where events were missed.

        Raises:
            InvalidRequest: they are off.
        """
        return self._kv_event_log().follow(after, snapshot=snapshot)

    async def read_kv_events(
        self,
        after: int | None,
        *,
        seconds: float = 0.0,
        most: int = MOST_READ,
        snapshot: bool = False,
        begun: int | None = None,
    ) -> KVEventsRead:
        """At most so many of them, for readers who ask again and again; waits for one for so long.

        Args:
            snapshot: what can be found now, instead.
            begun: more of a snapshot, as `KVEventsRead.snapshot` was.

        Raises:
            InvalidRequest: they are off, too many wait already, or a snapshot is to begin behind a number.
        """
        log = self._kv_event_log()
        if snapshot and (after is not None or begun is not None):
            raise InvalidRequest(
                "snapshot begins anew: it goes with neither after nor snapshot_begun", param="snapshot"
            )
        if snapshot or begun is not None:
            return log.read_snapshot(after or 0, begun, most)
        position = log.last if after is None else after
        try:
            if seconds > 0:
                await log.wait(position, seconds)
        except ValueError as error:
            raise InvalidRequest(str(error), code="too_many_readers") from None
        events = log.read(position, most)
        return KVEventsRead(events=tuple(events), last=events[-1].seq if events else position, ended=log.closed)

    def _kv_event_log(self) -> KVEventLog:
        log = self._on_loop().system.kv_events
        if log is None:
            raise InvalidRequest("KV events are off; start with kv_events keys or tokens", code="not_configured")
        return log

    async def start_profile(self, folder: str, *, name: str | None = None, max_steps: int = 100) -> None:
        """Record with torch's profiler what the worker does in its next steps, until `stop_profile`.

        Args:
            folder: where the trace goes, on the worker's machine; made if it is not there.
            name: of the file; a fresh one if not given.
            max_steps: recording ends by itself after so many.

        Raises:
            InvalidRequest: one is being recorded, the folder cannot be made, or the worker cannot.
        """
        if not 1 <= max_steps <= MOST_PROFILED_STEPS:
            raise InvalidRequest(f"max_steps must be between 1 and {MOST_PROFILED_STEPS}", param="max_steps")
        name = name or f"troupellm-{self._randomness.token(6)}"
        command = StartProfile(folder=folder, name=name, max_steps=max_steps)
        await self._on_loop().system.sleep_control.command(command)

    async def stop_profile(self) -> ProfileReport:
        """Write the trace, for Perfetto or chrome://tracing.

        Raises:
            InvalidRequest: none is being recorded.
        """
        report = await self._on_loop().system.sleep_control.command(StopProfile())
        return ProfileReport(file=report.file, steps=report.steps)
