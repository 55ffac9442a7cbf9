"""The HTTP side of a server, as its start and its shutdown see it: in this process, or in several of their own."""

import socket
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.engine.engine import Engine
from troupellm.actors.replicas.fleet import Fleet
from troupellm.protocol.api.admin import LogLevel
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.server.access.host_and_origin import guard_of
from troupellm.server.access.keys import read_keys
from troupellm.server.app.app import App, admin_access
from troupellm.server.host.admin_actions import AdminActions, apply_log_level
from troupellm.server.host.server_state import ServerState
from troupellm.server.http.listener import bind, bind_unix, metrics_port
from troupellm.server.http.server import HypercornServer
from troupellm.server.observe.load_log import LoadLog, terminal
from troupellm.server.observe.vitals import Vitals

Served = Engine | Fleet
"""One engine in this process, or a fleet of engine processes."""


class HttpSide(Protocol):
    """From before the model is loaded (everything is answered with 503 then) until the connections are closed."""

    @property
    def opened(self) -> bool:
        """Whether there is an engine behind it."""

    @property
    def in_flight(self) -> int:
        """Exchanges that use the engine."""

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Until `stop`. Never raises; what ends it early is `failure`."""

    def report(self, progress: LoadProgress) -> None:
        """How far loading is."""

    async def open(self, engine: Served) -> None:
        """Requests are served from now on; returns when all of it answers them."""

    def set_log_level(self, level: LogLevel) -> None:
        """Of every process of the server."""

    async def metrics(self) -> bytes:
        """Prometheus' text format.

        Raises:
            TroupeError: the model is loading, or has failed.
        """

    async def failure(self) -> Exception:
        """Waits for what ends the server; most servers never have one."""

    def refuse(self) -> None:
        """Not ready from now on: what comes is refused, also what has not sent its body yet."""

    async def idle(self) -> None:
        """Until no exchange is in flight."""

    def cut(self) -> None:
        """End the exchanges that are in flight."""

    async def stop(self, seconds: float) -> None:
        """Close the connections, which get `seconds` to take what was written to them."""


class LocalSide:
    """In the engine's own process."""

    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        """
        Raises:
            ConfigError: an empty API key.
        """
        self.host = ServerState(config)
        self.host.loading = True
        self.host.load_log = LoadLog(terminal())
        self.host.vitals = Vitals(config.loop_lag_warning)
        app = App(self.host, keys=read_keys(config).callers, guard=guard_of(config), **admin_access(config))
        self._http = HypercornServer(app, config, listener)
        self.host.vitals.connections = self._http.connections
        self.host.vitals.bodies = self.host.bodies

    @property
    def opened(self) -> bool:
        return self.host.engine is not None

    @property
    def in_flight(self) -> int:
        return len(self.host.in_flight)

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        assert self.host.vitals is not None
        async with anyio.create_task_group() as group, self.host.running():
            group.start_soon(self.host.vitals.lag.run)
            task_status.started()
            await self._http.run()
            group.cancel_scope.cancel()

    def report(self, progress: LoadProgress) -> None:
        self.host.report(progress)

    async def open(self, engine: Served) -> None:
        self.host.engine = engine
        if isinstance(engine, Fleet):
            self.host.administer, self.host.missing = engine.administer, engine.missing
        if self.host.vitals is not None:
            self.host.vitals.count_templates = engine.count_template_processes

    def set_log_level(self, level: LogLevel) -> None:
        apply_log_level(level)

    async def metrics(self) -> bytes:
        return await self.host.metrics()

    async def failure(self) -> Exception:
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    def refuse(self) -> None:
        self.host.refuse()

    async def idle(self) -> None:
        await self.host.idle()

    def cut(self) -> None:
        self.host.cut()

    async def stop(self, seconds: float) -> None:
        await self._http.stop(seconds)


class MetricsPort:
    """`/metrics` and the probes at a port of their own, which needs no key."""

    def __init__(self, config: ServerConfig, side: HttpSide) -> None:
        """
        Raises:
            OSError: the port is taken, or not ours.
        """
        port = metrics_port(config)
        assert port is not None
        own = msgspec.structs.replace(config, metrics="open", port=port, uds=None, ui=False)
        self._host = ServerState(own)
        self._host.loading = True
        self._host.metrics = side.metrics
        listener, self.url = bind(own)
        self._http = HypercornServer(App(self._host, keys=None, scopes=("open",), guard=guard_of(own)), own, listener)

    async def run(self) -> None:
        await self._http.run()

    def report(self, progress: LoadProgress) -> None:
        """How far loading is; the server's own log tells it."""
        self._host.progress = progress

    def open(self, engine: Served) -> None:
        self._host.engine = engine
        if isinstance(engine, Fleet):
            self._host.missing = engine.missing

    def refuse(self) -> None:
        """Not ready from now on."""
        self._host.refuse()

    async def stop(self) -> None:
        await self._http.stop()


class AdminSocket:
    """The admin routes at a unix socket of their own, beside any HTTP side: its file's mode says who may use them."""

    def __init__(self, config: ServerConfig, side: HttpSide) -> None:
        """
        Raises:
            OSError: the place is taken, or not ours.
        """
        assert config.admin_uds is not None
        self._host = ServerState(config)
        self._host.loading = True
        self._host.administer = AdminActions(config, self._engine, side.set_log_level).act
        app = App(self._host, keys=None, scopes=("open", "admin"))
        plain = msgspec.structs.replace(config, ssl_certfile=None, ssl_keyfile=None, ssl_ca_certs=None)
        self._http = HypercornServer(app, plain, bind_unix(config.admin_uds, config))
        self._opened: Engine | None = None

    async def run(self) -> None:
        await self._http.run()

    def open(self, engine: Served) -> None:
        self._host.engine = engine
        if isinstance(engine, Fleet):
            self._host.administer, self._host.missing = engine.administer, engine.missing
        else:
            self._opened = engine

    def _engine(self) -> Engine:
        self._host.require()
        assert self._opened is not None
        return self._opened

    async def stop(self) -> None:
        self._host.refuse()
        self._host.cut()
        await self._http.stop()
