"""Stopping in order, and in time, also if clients and workers hang.

1. First SIGTERM, SIGINT or SIGHUP: not ready any more (/readyz 503), and new requests are refused (503 `draining`,
   `Connection: close`, `Retry-After`), also those whose body is still on its way.
2. Running requests may finish, for `shutdown_timeout` seconds.
3. The others get their error event and `[DONE]`, and `FAREWELL_SECONDS` to take them; then their connections are cut.
4. Connections close, the engine closes, the process exits with 0 (see `exit_codes`).

A second SIGTERM or SIGINT skips to 3 and exits with 128 + its number within a second. A SIGHUP that was ignored when
the process started (`nohup`) stays ignored, and one after another signal changes nothing. A timer on a thread of its
own ends the process where any of that hangs: `CUT_SECONDS` after the drain, or after the second signal `ABORT_SECONDS`.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

import anyio
from anyio.abc import TaskStatus

from troupellm.server.base.exit_codes import EXIT_BY_SIGNAL, EXIT_FAILED, EXIT_OK
from troupellm.server.http.server import CLOSE_SECONDS
from troupellm.server.observe import logs
from troupellm.server.serve.http_side import HttpSide, MetricsPort, Served

logger = logging.getLogger("troupellm.server")

FAREWELL_SECONDS = 0.7
"""Seconds that streams have, after the drain, to write their last event."""
CUT_SECONDS = 1.8
"""After the drain, farewells and closing included."""
ABORT_SECONDS = 0.8
"""After the second signal; also what an abort leaves of `FAREWELL_SECONDS` and closing."""
FAILED_SECONDS = 4.0
"""Seconds for closing after the engine failed; a step that hangs is waited for a little."""
_ABORT_FAREWELL_SECONDS = 0.2
_MOST_CLOSE_SECONDS = 5.0
_FLUSH_SECONDS = 0.1


class HardExit:
    """Ends the process, from a thread of its own, unless it is called off in time. The earliest call counts.

    The thread waits from the start: when it is needed there may be none left to start.
    """

    def __init__(self, cleanup: Callable[[], None]) -> None:
        self._cleanup = cleanup
        self._changed = threading.Condition()
        self._due: tuple[float, int, str] | None = None
        self._over = False
        threading.Thread(target=self._watch, name="troupellm-hard-exit", daemon=True).start()

    def arm(self, seconds: float, code: int, why: str) -> None:
        due = (time.monotonic() + seconds, code, why)
        with self._changed:
            if self._due is None or due[0] < self._due[0]:
                self._due = due
                self._changed.notify()

    def disarm(self) -> None:
        """Call it off for good."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._over:
                left = None if self._due is None else self._due[0] - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            if self._over or self._due is None:
                return
            _, code, why = self._due
        try:
            logger.error("%s: the process ends now, with exit code %d", why, code)
            self._cleanup()
            logs.flush(_FLUSH_SECONDS)
        finally:
            os._exit(code)


class Shutdown:
    """Hears the signals and leads through the steps above."""

    def __init__(
        self, side: HttpSide, timeout: float, cleanup: Callable[[], None], metrics: MetricsPort | None = None
    ) -> None:
        """
        Args:
            timeout: seconds that what runs gets to finish.
            cleanup: called before a hard exit.
            metrics: the port of its own that has probes too.
        """
        self.requested = anyio.Event()
        self.forced = anyio.Event()
        self.exit_code = EXIT_OK
        self.loading = anyio.CancelScope()
        """Around the engine's whole life; cancelled by a signal that comes before it is ready."""
        self.hard_exit = HardExit(cleanup)
        self._side = side
        self._metrics = metrics
        self._timeout = timeout
        self._drained_by = 0.0

    async def watch(self, *, task_status: TaskStatus[None]) -> None:
        heard = {signal.SIGTERM, signal.SIGINT}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            heard.add(signal.SIGHUP)
        with anyio.open_signal_receiver(*heard) as signals:
            task_status.started()
            async for number in signals:
                if not self.requested.is_set():
                    self._request()
                elif number != signal.SIGHUP:  # a terminal that closes sends several
                    self._force(number)

    def refuse(self) -> None:
        """Not ready from now on, at every port."""
        self._side.refuse()
        if self._metrics is not None:
            self._metrics.refuse()

    async def drain(self, engine: Served) -> None:
        """Steps 2 and 3. Afterwards no exchange is in flight."""
        side, seconds = self._side, self._timeout
        began, waiting = time.monotonic(), side.in_flight
        if waiting:
            logger.info("draining %d requests, for %g seconds at most", waiting, seconds)
        async with anyio.create_task_group() as group:
            group.start_soon(self._until_forced, group.cancel_scope)
            with anyio.move_on_after(seconds):
                await engine.drain(seconds)
                await side.idle()
            group.cancel_scope.cancel()
        left = 0.0 if self.forced.is_set() else max(0.0, self._drained_by - time.monotonic())
        await engine.drain(left)  # ends what is left, when the deadline or a second signal came first
        late = side.in_flight
        with anyio.move_on_after(_ABORT_FAREWELL_SECONDS if self.forced.is_set() else FAREWELL_SECONDS):
            await side.idle()
        cut = side.in_flight
        side.cut()
        logger.info(
            "drained in %.1f seconds: %d requests finished, %d were ended early, %d of them without taking the news",
            time.monotonic() - began,
            waiting - late,
            late,
            cut,
        )

    def closing_seconds(self) -> float:
        """Seconds that connections have to read their last bytes: the rest of the drain, within limits."""
        if self.forced.is_set():
            return _ABORT_FAREWELL_SECONDS
        return min(max(self._drained_by - time.monotonic(), CLOSE_SECONDS), _MOST_CLOSE_SECONDS)

    def _request(self) -> None:
        self.refuse()
        self._drained_by = time.monotonic() + self._timeout
        self.requested.set()
        if not self._side.opened:
            self.hard_exit.arm(CUT_SECONDS, EXIT_OK, "loading does not stop")
            self.loading.cancel()
        else:
            self.hard_exit.arm(self._timeout + CUT_SECONDS, EXIT_FAILED, "the shutdown hangs")

    def _force(self, number: int) -> None:
        self.exit_code = EXIT_BY_SIGNAL + number
        self.hard_exit.arm(ABORT_SECONDS, self.exit_code, "aborted by a second signal")
        self.forced.set()

    async def _until_forced(self, scope: anyio.CancelScope) -> None:
        await self.forced.wait()
        scope.cancel()
