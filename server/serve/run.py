"""`serve`: bind, load behind a 503, serve, drain on SIGTERM or SIGINT, and come back with an exit code.

How it stops is in `shutdown`, what the exit codes mean in `exit_codes`.
"""

import gc
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import msgspec

from troupellm.actors.engine.engine import Engine
from troupellm.actors.replicas.fleet import Fleet
from troupellm.actors.replicas.replica import spawn_process
from troupellm.models.worker.memory_use import return_large_blocks
from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.errors import ConfigError, TroupeError
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink
from troupellm.server.access.auth import owners_of
from troupellm.server.access.host_and_origin import guard_of
from troupellm.server.access.keys import read_keys, with_tenants
from troupellm.server.api_processes.processes import ApiProcesses
from troupellm.server.app.routes import routes
from troupellm.server.base.errors import flatten
from troupellm.server.base.exit_codes import EXIT_FAILED
from troupellm.server.batches.runner import held_folder, running_batches
from troupellm.server.host.server_state import STEP_TIMEOUT, ServerState, stream_defaults
from troupellm.server.host.volatile_lines import VolatileLines
from troupellm.server.http.connection_limit import few_descriptors
from troupellm.server.http.listener import bind, metrics_port, unlink
from troupellm.server.http.server import CLOSE_SECONDS, tls_context
from troupellm.server.observe import logs
from troupellm.server.observe.vitals import log_stats
from troupellm.server.serve.http_side import AdminSocket, HttpSide, LocalSide, MetricsPort, Served
from troupellm.server.serve.shutdown import FAILED_SECONDS, FAREWELL_SECONDS, Shutdown
from troupellm.server.storage.responses_schema import check_database

logger = logging.getLogger("troupellm.server")

OnReady = Callable[[Served, str], Coroutine[Any, Any, None]]

REPLICA_MODULE = "troupellm.server.replica_process.main"
FLUSH_SECONDS = 0.3
"""Seconds that waiting log lines have at the end."""


class EngineFailed(TroupeError):
    """The engine gave up while it served."""

    default_code = "engine_failed"


async def serve(
    engine_config: EngineConfig, server_config: ServerConfig | None = None, on_ready: OnReady | None = None
) -> int:
    """Serve until a signal, then drain. Needs the main thread, whose SIGTERM and SIGINT it takes meanwhile.

    Args:
        on_ready: awaited with the open engine and the URL once requests are answered.

    Returns:
        The exit code: 0, or 128 + the signal that cut the drain short.

    Raises:
        ConfigError: an empty API key, a wrong file of keys or lines, or a file or folder that cannot serve.
        ModelLoadError: the model cannot be served.
        EngineFailed: the engine failed for good.
        OSError: the address cannot be bound.
    """
    config = server_config or ServerConfig()
    logs.configure(config.log_format, config.log_level)
    # Errors of the configuration are reported before a socket is bound.
    engine_config = with_tenants(engine_config, read_keys(config).tenants)
    if engine_config.parallel.data_parallel_size > 1 and config.api_server_count:
        text = "api_server_count must be 0 with data_parallel_size above 1: this process speaks HTTP for all replicas"
        raise ConfigError(text, param="api_server_count")
    if engine_config.parallel.data_parallel_size > 1 and engine_config.parallel.tensor_parallel_size > 1:
        text = "data_parallel_size must be 1 with tensor_parallel_size above 1: replicas of several ranks are not there"
        raise ConfigError(text, param="data_parallel_size")
    guard_of(config)
    tls_context(config)
    metrics_port(config)
    check_database(config.responses_store)
    VolatileLines.read(config.volatile_lines)
    if engine_config.worker.worker_process is not False:
        return_large_blocks()
    with held_folder(config):
        return await _serve(config, engine_config, on_ready)


async def _serve(config: ServerConfig, engine_config: EngineConfig, on_ready: OnReady | None) -> int:
    """With settings that were checked."""
    if config.api_server_count > 1 and config.responses_store is None and config.responses_store_entries:
        logger.info("responses are not kept: with --api-server-count above 1 that needs --responses-store")
    if (text := few_descriptors(config)) is not None:
        logger.warning(text)
    listener, url = bind(config)
    side: HttpSide = LocalSide(config, listener) if not config.api_server_count else ApiProcesses(config, listener)
    beside: list[AdminSocket | MetricsPort] = []
    if config.admin_uds is not None:
        beside.append(AdminSocket(config, side))
    metrics = None if metrics_port(config) is None else MetricsPort(config, side)
    if metrics is not None:
        beside.append(metrics)
    shutdown = Shutdown(side, config.shutdown_timeout, lambda: unlink(config), metrics)
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            await group.start(shutdown.watch)
            await group.start(side.run)
            for further in beside:
                group.start_soon(further.run)
            try:
                await _run_engine(side, beside, shutdown, config, engine_config, url, on_ready)
            except (Exception, BaseExceptionGroup) as error:
                failure = flatten(error)
            shutdown.refuse()
            await side.stop(CLOSE_SECONDS)
            for further in beside:
                await further.stop()
            group.cancel_scope.cancel()
    finally:
        shutdown.hard_exit.disarm()
        unlink(config)
        logs.flush(FLUSH_SECONDS)
    if failure is not None:
        raise failure
    return shutdown.exit_code


async def _run_engine(
    side: HttpSide,
    beside: Sequence[AdminSocket | MetricsPort],
    shutdown: Shutdown,
    config: ServerConfig,
    engine_config: EngineConfig,
    url: str,
    on_ready: OnReady | None,
) -> None:
    logger.info("listening at %s, loading the model", url)
    given = msgspec.to_builtins(engine_config.stream)
    named = [name for name, value in given.items() if value is not None]
    stream = msgspec.structs.replace(engine_config.stream, **stream_defaults(named, config.api_server_count))
    worker = engine_config.worker
    if worker.worker_process is None:  # a busy event loop slows a worker on a thread of the same interpreter
        worker = msgspec.structs.replace(worker, worker_process=True)
    if worker.step_timeout is None:
        worker = msgspec.structs.replace(worker, step_timeout=STEP_TIMEOUT)
    engine_config = msgspec.structs.replace(engine_config, stream=stream, worker=worker)

    def report(progress: LoadProgress) -> None:
        side.report(progress)
        for further in beside:
            if isinstance(further, MetricsPort):
                further.report(progress)

    with shutdown.loading:
        async with _engine(engine_config, config, report) as engine:
            await side.open(engine)
            for further in beside:
                further.open(engine)
            logger.info("ready: %s at %s", engine.model_names[0], url)
            # Loaded objects stay: full collections need not walk them, which would hold up every stream.
            gc.collect()
            gc.freeze()
            async with anyio.create_task_group() as group:
                if not config.disable_log_stats:
                    group.start_soon(log_stats, engine, config.log_stats_interval)
                if on_ready is not None:  # cancelled last: where a step hangs it ends with the drain, not before
                    group.start_soon(on_ready, engine, url)
                async with _batches(side, engine, config):
                    failure = await _until_over(engine, side, shutdown)
                await _wind_up(side, engine, shutdown)
                group.cancel_scope.cancel()
            await side.stop(shutdown.closing_seconds())
            if failure is not None:
                raise failure
            if engine.failure is not None:
                raise EngineFailed(f"the engine has failed: {engine.failure}") from engine.failure


def _engine(engine_config: EngineConfig, config: ServerConfig, progress: ProgressSink) -> Served:
    if engine_config.parallel.data_parallel_size == 1:
        return Engine(config=engine_config, progress=progress)
    plain = msgspec.structs.replace(config, api_key=(), api_key_file=None, admin_api_key=())
    return Fleet(engine_config, plain, partial(spawn_process, REPLICA_MODULE), progress)


@asynccontextmanager
async def _batches(side: HttpSide, engine: Served, config: ServerConfig) -> AsyncIterator[None]:
    """Batches are worked on inside the block, with routes of this process, wherever HTTP is spoken."""
    if config.files_dir is None:
        yield
        return
    host = side.host if isinstance(side, LocalSide) else ServerState(config, engine)
    try:
        async with running_batches(engine, config, routes(host, "/v1"), host, owners_of(read_keys(config).callers)):
            yield
    finally:
        if not isinstance(side, LocalSide):
            await host.responses.close()
            await host.batches.close()


async def _until_over(engine: Served, side: HttpSide, shutdown: Shutdown) -> Exception | None:
    """Until a signal, or until the engine has failed for good; or the HTTP side, whose failure it gives."""
    failures: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def until_failed() -> None:
            await engine.wait_failed()
            group.cancel_scope.cancel()

        async def until_side_failed() -> None:
            failures.append(await side.failure())
            group.cancel_scope.cancel()

        group.start_soon(until_failed)
        group.start_soon(until_side_failed)
        await shutdown.requested.wait()
        group.cancel_scope.cancel()
    return failures[0] if failures else None


async def _wind_up(side: HttpSide, engine: Served, shutdown: Shutdown) -> None:
    """Drain, or let everybody read that the engine has failed."""
    if engine.failure is None:
        await shutdown.drain(engine)
        return
    logger.error("the engine has failed: %s", engine.failure, exc_info=engine.failure)
    shutdown.hard_exit.arm(FAILED_SECONDS, EXIT_FAILED, "the failed engine does not close")
    shutdown.refuse()
    with anyio.move_on_after(FAREWELL_SECONDS):
        await side.idle()
