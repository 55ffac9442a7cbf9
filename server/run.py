"""`serve`: bind, load behind a 503, serve, drain on SIGTERM or SIGINT, and come back with how it ended."""

import gc
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from anyio.abc import TaskStatus

from troupellm.actors.engine import Engine
from troupellm.protocol.config import EngineConfig, ServerConfig
from troupellm.protocol.errors import TroupeError
from troupellm.server import logs
from troupellm.server.app import App
from troupellm.server.errors import flatten
from troupellm.server.front import CLOSE_SECONDS, HttpFront
from troupellm.server.host import STREAM_DEFAULTS, EngineHost
from troupellm.server.listener import bind

logger = logging.getLogger("troupellm.server")

OnReady = Callable[[Engine, str], Awaitable[None]]

FAREWELL_SECONDS = 1.0
"""What streams get, after the drain, to write their last event."""
HARD_EXIT_SECONDS = 5.0
"""After the drain and all of the above, the process ends whatever still hangs."""
_WATCH_SECONDS = 0.25


class EngineFailed(TroupeError):
    """The engine gave up while it served."""

    default_code = "engine_failed"


async def serve(
    engine_config: EngineConfig, server_config: ServerConfig | None = None, on_ready: OnReady | None = None
) -> None:
    """Serve until a signal, then drain. Needs the main thread, whose SIGTERM and SIGINT it takes meanwhile.

    Args:
        on_ready: awaited with the open engine and the URL once requests are answered.

    Raises:
        ConfigError: an empty API key.
        ModelLoadError: the model cannot be served.
        EngineFailed: the engine failed for good.
        OSError: the address cannot be bound.
    """
    config = server_config or ServerConfig()
    logs.configure(config.log_format)
    host = EngineHost(config)
    app = App(host, keys=config.api_key)
    listener, url = bind(config)
    shutdown = _Shutdown(host)
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            await group.start(shutdown.watch)
            front = HttpFront(app, config, listener)
            group.start_soon(front.run)
            try:
                await _run_engine(host, shutdown, engine_config, url, on_ready)
            except (Exception, BaseExceptionGroup) as error:
                failure = flatten(error)
            host.draining = True
            await front.stop()
            group.cancel_scope.cancel()
    finally:
        shutdown.close()
    if failure is not None:
        raise failure


async def _run_engine(
    host: EngineHost, shutdown: "_Shutdown", engine_config: EngineConfig, url: str, on_ready: OnReady | None
) -> None:
    host.loading = True
    logger.info("listening at %s, loading the model", url)
    given = msgspec.to_builtins(engine_config.stream)
    stream = msgspec.structs.replace(
        engine_config.stream, **{name: value for name, value in STREAM_DEFAULTS.items() if given[name] is None}
    )
    engine_config = msgspec.structs.replace(engine_config, stream=stream)
    with shutdown.loading:
        async with Engine(config=engine_config, progress=host.report) as engine:
            host.engine = engine
            logger.info("ready: %s at %s", engine.model_names[0], url)
            if on_ready is not None:
                await on_ready(engine, url)
            # What was loaded stays: full collections need not walk it any more, which would hold up every stream.
            gc.collect()
            gc.freeze()
            while not shutdown.requested.is_set():
                with anyio.move_on_after(_WATCH_SECONDS):
                    await shutdown.requested.wait()
                if engine.state in ("failed", "stopped"):
                    raise EngineFailed(f"the engine has failed: {engine.failure}") from engine.failure
            await _drain(host, engine, shutdown)


async def _drain(host: EngineHost, engine: Engine, shutdown: "_Shutdown") -> None:
    """Let running streams finish, fail the rest with a last event, and cut what does not even take that."""
    logger.info("draining %d requests", len(host.in_flight))
    async with anyio.create_task_group() as group:

        async def force() -> None:
            await shutdown.forced.wait()
            group.cancel_scope.cancel()

        group.start_soon(force)
        await engine.drain(host.config.shutdown_timeout)
        group.cancel_scope.cancel()
    if shutdown.forced.is_set():
        await engine.drain(0.0)
    with anyio.move_on_after(FAREWELL_SECONDS):
        await host.idle()
    for exchange in list(host.in_flight):
        exchange.cancel_scope.cancel()


class _Shutdown:
    """The first signal asks for a drain, the second ends it, and a timer ends the process if all that hangs."""

    def __init__(self, host: EngineHost) -> None:
        self.requested = anyio.Event()
        self.forced = anyio.Event()
        self.loading = anyio.CancelScope()
        """Around the engine's whole life; cancelled by a signal that comes before it is ready."""
        self._host = host
        self._timer: threading.Timer | None = None

    async def watch(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                self._host.draining = True
                if self.requested.is_set():
                    self.forced.set()
                else:
                    self.requested.set()
                    self._start_timer()
                if self._host.engine is None:
                    self.loading.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self) -> None:
        seconds = self._host.config.shutdown_timeout + FAREWELL_SECONDS + 2 * CLOSE_SECONDS + HARD_EXIT_SECONDS
        self._timer = threading.Timer(seconds, os._exit, (1,))
        self._timer.daemon = True
        self._timer.start()
