"""An API process: hypercorn and the ASGI app over an engine that lives in the process that started this one.

`ApiProcesses` starts it with an inherited listening socket and one end of a socket pair. It ends when told to, with the
other end of the pair, and with its parent's death: no API process outlives the engine it serves.
"""

import logging
import socket
import sys
from collections.abc import Sequence
from typing import assert_never

import anyio

from troupellm.actors.remote.client import SILENT_SECONDS, RemoteEngine
from troupellm.actors.remote.prompts import read_tokenizer
from troupellm.actors.runtime.link import Link, PeerGone
from troupellm.actors.runtime.ports import LoopPort, SystemClock, SystemRandomness
from troupellm.actors.runtime.thread_pool import ThreadPool
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.models.chat_template.template_process import TemplateProcesses
from troupellm.models.worker.memory_use import return_large_blocks
from troupellm.protocol.wire.api_process import (
    AdminAnswer,
    Admitted,
    ApiProcessReady,
    ApiProcessReport,
    ChargeAnswer,
    Chunks,
    Configure,
    Cut,
    Ended,
    FromApiProcess,
    Leave,
    Loading,
    MetricsText,
    Serving,
    SetLogLevel,
    Status,
    ToApiProcess,
)
from troupellm.server.access.host_and_origin import guard_of
from troupellm.server.app.app import App, admin_access
from troupellm.server.base.exit_codes import EXIT_FAILED, EXIT_OK
from troupellm.server.host.server_state import ServerState
from troupellm.server.http.server import CLOSE_SECONDS, HypercornServer
from troupellm.server.observe.process_life import FLUSH_SECONDS, live, run_child
from troupellm.server.observe.vitals import Vitals

REPORT_SECONDS = 0.25
FAREWELL_SECONDS = 0.5
"""Seconds that streams have to read the error after the engine's process is gone."""
_POOL_SIZE = 4
"""Two of them for long texts at most: see `long_texts`."""


class ApiServer:
    """One API process's life, from its configuration to its end."""

    def __init__(self, link: Link[FromApiProcess, ToApiProcess], configure: Configure, listener: socket.socket) -> None:
        config = configure.server
        self._link = link
        self._host = host = ServerState(config)
        host.loading = True
        host.reported_elsewhere = True
        host.batches.runs = True  # in the engine's process
        host.created = configure.created
        host.on_change = self._report_soon
        host.further_reasons = self._reasons
        host.vitals = self._vitals = Vitals(config.loop_lag_warning, f"front-{configure.number}")
        app = App(host, keys=configure.keys, guard=guard_of(config), **admin_access(config, configure.admin_keys))
        self._http = HypercornServer(app, config, listener)
        self._vitals.connections = self._http.connections
        return_large_blocks()
        self._pool = ThreadPool("troupellm-front", _POOL_SIZE)
        self._templates = TemplateProcesses()
        self._vitals.bodies = host.bodies
        self._vitals.count_templates = lambda: len(self._templates.pids)
        self._remote: RemoteEngine | None = None
        self._serving: Serving | None = None
        self._status: Status | None = None
        self._closing_seconds = CLOSE_SECONDS
        self._changed: Waiter | None = None
        self._stale = False

    async def run(self) -> int:
        """Until told to leave (0), or until the engine's process is gone (1)."""
        try:
            async with anyio.create_task_group() as group, self._host.running():
                group.start_soon(self._http.run)
                group.start_soon(self._vitals.lag.run)
                group.start_soon(self._report)
                stopped = await self._listen(group)
                if not stopped:
                    await self._say_farewell()
                await self._http.stop(self._closing_seconds)
                self._link.post(self._state())
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                self._templates.close()
                await self._pool.close(FLUSH_SECONDS)
        return EXIT_OK if stopped else EXIT_FAILED

    async def _listen(self, group: anyio.abc.TaskGroup) -> bool:
        """Follow the engine's process; True when it has said that it is time to leave."""
        while True:
            try:
                message = await self._link.receive()
            except PeerGone:
                return False
            match message:
                case Chunks() | Admitted() | Ended() | MetricsText() | AdminAnswer() | ChargeAnswer():
                    if self._remote is not None:
                        self._remote.handle(message)
                case Status():
                    self._on_status(message)
                case Loading(progress=progress):
                    self._host.progress = progress
                case Serving():
                    self._serving = message
                    group.start_soon(self._open)
                case SetLogLevel(level=level):
                    logging.getLogger("troupellm").setLevel(level.upper())
                case Cut():
                    self._host.cut()
                case Leave(seconds=seconds):
                    self._closing_seconds = seconds
                    return True
                case Configure():
                    raise RuntimeError("configured twice")
                case _:
                    assert_never(message)

    def _on_status(self, status: Status) -> None:
        self._status = status
        self._host.in_flight_elsewhere = status.in_flight_elsewhere
        if self._remote is not None:
            self._remote.handle(status)
        if status.draining and not self._host.draining:
            self._host.refuse()
            self._report_soon()

    async def _open(self) -> None:
        """Read tokenizer and template, which the engine's process has on this machine, and serve."""
        serving, status = self._serving, self._status
        assert serving is not None
        assert status is not None, "the state comes before the engine"
        tokenizer, chat_format = await self._pool.run(read_tokenizer, serving, self._templates)
        self._remote = RemoteEngine(
            serving,
            self._status or status,
            tokenizer=tokenizer,
            chat_template=chat_format.template,
            chat_format=chat_format,
            post=self._link.post,
            on_loop=LoopPort().post,
            threads=self._pool,
            clock=SystemClock(),
            randomness=SystemRandomness(),
        )
        self._host.administer = self._remote.administer
        self._host.engine = self._remote
        self._link.post(ApiProcessReady())

    def _reasons(self) -> list[str]:
        """Why requests should not be sent here, beside what the engine itself says."""
        silent = 0.0 if self._remote is None else self._remote.silent_seconds
        return (
            [f"the engine's process has not been heard of for {silent:.0f} seconds"] if silent > SILENT_SECONDS else []
        )

    async def _say_farewell(self) -> None:
        if self._remote is not None:
            self._remote.lost()
        self._host.failure = "the engine's process has ended"
        with anyio.move_on_after(FAREWELL_SECONDS):
            await self._host.idle()
        self._host.cut()

    def _report_soon(self) -> None:
        self._stale = True
        if self._changed is not None:
            self._changed.wake()

    async def _report(self) -> None:
        """All that changed in one turn of the loop is one report."""
        while True:
            self._stale = False
            self._link.post(self._state())
            if not self._stale:
                self._changed = new_waiter()
                await self._changed.wait(REPORT_SECONDS)
                self._changed = None

    def _state(self) -> ApiProcessReport:
        signs = self._vitals.signs
        return ApiProcessReport(
            counts=self._host.counts.take(),
            in_flight=len(self._host.in_flight),
            draining=self._host.draining,
            loop_lag=signs.loop_lag,
            log_lines_dropped=signs.log_lines_dropped or 0,
            tasks=signs.tasks,
            connections=signs.connections or 0,
            connections_dropped=signs.connections_dropped,
            body_bytes=signs.body_bytes,
            bodies_waiting=signs.bodies_waiting,
            template_processes=signs.template_processes,
        )


async def serve(engine: socket.socket, listener: socket.socket) -> int:
    """An API process on an inherited listener, for the engine at the other end of a socket pair."""

    async def run(link: Link[FromApiProcess, ToApiProcess], configure: Configure) -> int:
        return await ApiServer(link, configure, listener).run()

    return await live("API process", engine, ToApiProcess, Configure, run)


def main(argv: Sequence[str] | None = None) -> int:
    sockets = {
        "engine": "descriptor of the socket to the engine's process",
        "listener": "descriptor of the listening socket",
    }
    return run_child("troupellm-front", sockets, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
