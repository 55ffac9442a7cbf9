"""API server processes, as the start and the shutdown of a server see them: one `HttpSide`.

One listening socket is bound here and inherited by all; an idle process accepts. Each API process has a socket pair
with this process and shares nothing with the others: no lock, no memory, no count. Their counts are added up here.
"""

import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.engine.engine import Engine
from troupellm.actors.replicas.fleet import Fleet
from troupellm.actors.runtime.ports import SystemClock
from troupellm.actors.runtime.restart_intensity import Intensity
from troupellm.actors.runtime.supervise import Child, Supervisor
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.api.admin import LogLevel
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import EngineStopped, TroupeError
from troupellm.protocol.messages.snapshot import EngineSnapshot, SchedulerSnapshot
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.protocol.wire.api_process import Configure, Cut, HttpCount, Loading, SetLogLevel, Status, ToApiProcess
from troupellm.server.access.auth import admin_keys
from troupellm.server.access.keys import read_keys
from troupellm.server.api_processes.process import ApiProcess, ApiProcessDied
from troupellm.server.base.errors import flatten, not_ready
from troupellm.server.host.admin_actions import AdminActions, apply_log_level
from troupellm.server.observe.load_log import LoadLog, terminal
from troupellm.server.observe.metrics import HttpCounts
from troupellm.server.observe.vitals import Vitals
from troupellm.server.storage.batches_service import Batches
from troupellm.server.storage.responses import ResponseStore

logger = logging.getLogger("troupellm.server")

INTENSITY = Intensity(restarts=5, seconds=600.0)
"""Of each API process by itself; one that crashes more often takes the server down. One that hangs is found after half
a minute or a whole one: as many of these as restarts must fit in."""


class ApiProcessesFailed(TroupeError):
    """The API processes cannot be kept alive."""

    default_code = "fronts_failed"


class ApiProcesses:
    """Implements `HttpSide` with `config.api_server_count` processes."""

    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        """
        Raises:
            ConfigError: an empty API key, or a key file that says something wrong.
        """
        self._keys = read_keys(config).callers
        self._admin_keys = admin_keys(config.admin_api_key)
        self.engine: Engine | None = None
        self.progress: LoadProgress | None = None
        self._load_log = LoadLog(terminal())
        self._config = config
        self._listener = listener
        self._created = int(time.time())
        self._responses = ResponseStore(config)
        self._batches = Batches(config)
        self._draining = False
        self._counts = HttpCounts()
        self._vitals = Vitals(config.loop_lag_warning, "engine")
        self._api_processes: dict[int, ApiProcess] = {}
        self._failed: list[Exception] = []
        self._over = False
        self._waiters: list[Waiter] = []
        children = [
            Child(
                name=f"front-{number}",
                build=partial(self._build, number),
                strategy="restart",
                on_crash=partial(self._on_crash, number),
            )
            for number in range(config.api_server_count)
        ]
        self.admin_actions = AdminActions(config, self._require, self.set_log_level)
        self._supervisor = Supervisor(children, SystemClock(), INTENSITY)

    # For start and shutdown.

    @property
    def opened(self) -> bool:
        return self.engine is not None

    @property
    def in_flight(self) -> int:
        return sum(api_process.report.in_flight for api_process in self._api_processes.values())

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._vitals.lag.run)
                await self._supervisor.run(task_status=task_status)
                group.cancel_scope.cancel()
        except Exception as error:
            cause = flatten(error)
            failure = ApiProcessesFailed(f"the API processes keep ending: {str(cause) or type(cause).__name__}")
            failure.__cause__ = cause
            self._failed.append(failure)
        finally:
            self._over = True
            self._listener.close()
            self.changed()
            with anyio.CancelScope(shield=True):
                await self._responses.close()
                await self._batches.close()

    def report(self, progress: LoadProgress) -> None:
        self.progress = progress
        self._load_log.report(progress)
        self._post(Loading(progress))

    async def open(self, engine: Engine | Fleet) -> None:
        """
        Args:
            engine: no fleet, for which this process speaks HTTP itself.

        Raises:
            ApiProcessesFailed: they cannot be kept alive.
        """
        assert isinstance(engine, Engine)
        self.engine = engine
        for api_process in list(self._api_processes.values()):
            api_process.serve(engine)
        await self._until(lambda: self._over or self._all(lambda api_process: api_process.ready))
        if self._failed:
            raise self._failed[0]

    async def failure(self) -> Exception:
        await self._until(lambda: bool(self._failed))
        return self._failed[0]

    def refuse(self) -> None:
        self._draining = True
        for api_process in list(self._api_processes.values()):
            api_process.send_status()

    async def idle(self) -> None:
        """Until every front has heard that it is draining, and has nothing in flight."""
        await self._until(
            lambda: (
                self._over
                or not any(
                    api_process.linked and not api_process.drained for api_process in self._api_processes.values()
                )
            )
        )

    def cut(self) -> None:
        self._post(Cut())

    async def stop(self, seconds: float) -> None:
        self._draining = True
        for api_process in list(self._api_processes.values()):
            api_process.leave(seconds)
        await self._until(lambda: self._over)

    def set_log_level(self, level: LogLevel) -> None:
        apply_log_level(level)
        self._post(SetLogLevel(level))

    # For the members.

    def configure(self, number: int) -> Configure:
        config = msgspec.structs.replace(self._config, api_key=(), api_key_file=None, admin_api_key=())
        return Configure(
            number=number, server=config, keys=self._keys, created=self._created, admin_keys=self._admin_keys
        )

    def status(self, number: int) -> Status:
        others = (api_process.report.in_flight for other, api_process in self._api_processes.items() if other != number)
        return Status(snapshot=self._snapshot(), draining=self._draining, in_flight_elsewhere=sum(others))

    def counted(self, counts: tuple[HttpCount, ...]) -> None:
        self._counts.add(counts)

    async def metrics(self) -> bytes:
        text = self.metrics_text(compat=self._config.metrics_compat == "vllm")
        return text + await self._responses.metrics() + await self._batches.metrics()

    def metrics_text(self, *, compat: bool) -> bytes:
        if self.engine is None:
            raise not_ready("the model is loading", code="starting")
        signs = {f"front-{number}": api_process.signs for number, api_process in sorted(self._api_processes.items())}
        return self.engine.metrics_text(compat=compat) + self._counts.text(self.in_flight) + self._vitals.text(signs)

    def changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()

    def _require(self) -> Engine:
        if self.engine is None:
            raise EngineStopped("the model is loading", code="starting")
        return self.engine

    def _snapshot(self) -> EngineSnapshot:
        if self.engine is not None:
            return self.engine.snapshot()
        return EngineSnapshot(
            state="starting",
            uptime_seconds=0.0,
            model="",
            max_model_len=0,
            open_requests=0,
            scheduler=SchedulerSnapshot(),
            actors=(),
        )

    def _build(self, number: int) -> ApiProcess:
        api_process = self._api_processes[number] = ApiProcess(self, number, self._listener)
        if self._draining:
            api_process.leave(0.0)
        return api_process

    def _on_crash(self, number: int, cause: Exception, owed: list[Any]) -> None:
        """Its requests ended with it; those of the others go on."""
        bug = None if isinstance(cause, ApiProcessDied) else cause
        logger.error("%s%s", cause, "" if self._draining else "; another one is started", exc_info=bug)

    def _post(self, message: ToApiProcess) -> None:
        for api_process in list(self._api_processes.values()):
            api_process.post(message)

    def _all(self, holds: Callable[[ApiProcess], bool]) -> bool:
        return len(self._api_processes) == self._config.api_server_count and all(
            map(holds, self._api_processes.values())
        )

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            waiter = new_waiter()
            self._waiters.append(waiter)
            await waiter.wait()
