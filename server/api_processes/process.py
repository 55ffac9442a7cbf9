"""One API process as its parent runs it: the process, the link to it, and the engine's side of its requests.

Owns:      one child process at a time and what it has in flight.
Receives:  frames of the API process.
Sends:     frames to it; its requests to the engine.
On crash:  the API process's requests are ended, and the supervisor starts another one.
"""

import os
import socket
import subprocess
import sys
from typing import Any, Protocol, assert_never

import anyio
import anyio.abc
from anyio.abc import TaskStatus

import troupellm
from troupellm.actors.engine.api_process_session import ApiProcessSession
from troupellm.actors.engine.engine import Engine
from troupellm.actors.runtime.link import FrameError, Link, PeerGone, open_link
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.protocol.wire.api_process import (
    Abort,
    AdminAnswer,
    ApiProcessReady,
    ApiProcessReport,
    Apply,
    AskAdmin,
    AskCharge,
    AskMetrics,
    CancelAdmin,
    Configure,
    CorrectCharge,
    FromApiProcess,
    HttpCount,
    Leave,
    Loading,
    MetricsText,
    PauseReader,
    ResumeReader,
    Status,
    Submit,
    ToApiProcess,
    WireError,
)
from troupellm.server.base.errors import flatten
from troupellm.server.host import admin_actions
from troupellm.server.observe.vitals import VitalSigns

MODULE = "troupellm.server.api_processes.main"
GREETING_SECONDS = 30.0
"""From the start of a process to its first word; a loaded machine takes seconds to start Python."""
END_SECONDS = 1.0
"""Seconds that an API process has to end after it has closed its connections; then it is killed."""
STATUS_SECONDS = 0.25
DEAF_REPORTS = 120
"""An API process that misses so many of its reports in a row (half a minute of them) hangs, and is replaced."""


class ApiProcessDied(TroupeError):
    """An API process ended without an order."""

    default_code = "front_died"


class Parent(Protocol):
    """The knowledge of an API process's parent: see `processes`."""

    @property
    def engine(self) -> Engine | None: ...

    @property
    def progress(self) -> LoadProgress | None: ...

    def configure(self, number: int) -> Configure: ...

    def status(self, number: int) -> Status: ...

    def counted(self, counts: tuple[HttpCount, ...]) -> None: ...

    def metrics_text(self, *, compat: bool) -> bytes: ...

    @property
    def admin_actions(self) -> admin_actions.AdminActions:
        """Carries out what admin routes ask."""

    def changed(self) -> None:
        """An API process is ready, idle, or gone."""


class ApiProcess:
    """One API process. Rebuilt after a crash."""

    def __init__(self, parent: Parent, number: int, listener: socket.socket) -> None:
        self._parent = parent
        self._number = number
        self._listener = listener
        self._link: Link[ToApiProcess, FromApiProcess] | None = None
        self._process: anyio.abc.Process | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._session: ApiProcessSession | None = None
        self._asked: dict[int, anyio.CancelScope] = {}
        """Around what admin routes have asked for."""
        self._leaving = False
        self._scope = anyio.CancelScope()
        """Around all of its life."""
        self.linked = False
        """It has spoken, and may have requests."""
        self.ready = False
        self.report = ApiProcessReport(counts=(), in_flight=0, draining=False, loop_lag=0.0, log_lines_dropped=0)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def drained(self) -> bool:
        """It has heard that it takes no more requests, and has none."""
        return self.report.draining and not self.report.in_flight

    @property
    def signs(self) -> VitalSigns:
        report = self.report
        return VitalSigns(
            report.loop_lag,
            report.log_lines_dropped,
            report.tasks,
            report.connections,
            report.connections_dropped,
            report.body_bytes,
            report.bodies_waiting,
            report.template_processes,
        )

    def post(self, message: ToApiProcess) -> None:
        if self._link is not None:
            self._link.post(message)

    def send_status(self) -> None:
        self.post(self._parent.status(self._number))

    def leave(self, seconds: float) -> None:
        """Have it close its connections and end."""
        self._leaving = True
        if self.linked:
            self.post(Leave(seconds))
        else:
            self._scope.cancel()

    def serve(self, engine: Engine) -> None:
        """The engine is there: tell the API process, and take its requests from now on."""
        if self._link is None or self._group is None:
            return  # it is starting, and will find the engine there
        self._session = engine.api_process_session(self._link.post, self._link.drained)
        self._group.start_soon(self._session.run)
        self.send_status()
        self.post(engine.serving())

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """
        Raises:
            ApiProcessDied: the process ended by itself, or broke the protocol.
        """
        task_status.started()  # starting does not wait for this process: the others serve meanwhile
        why, patience = "", END_SECONDS
        try:
            with self._scope:
                self._link = await self._start()
                await self._live(self._link)
        except Exception as error:  # an API process that misbehaves is an API process that is replaced
            cause = flatten(error)
            if not isinstance(cause, PeerGone):  # which says no more than the exit code
                why, patience = f": {cause}", 0.0
            if not isinstance(cause, FrameError | ApiProcessDied):
                raise
        finally:
            self.ready, self.linked = False, False
            self.report = ApiProcessReport(counts=(), in_flight=0, draining=False, loop_lag=0.0, log_lines_dropped=0)
            code = await self._end(0.0 if self._scope.cancel_called else patience)
            self._parent.changed()
        if not self._leaving:
            raise ApiProcessDied(f"API process {self._number} ended{_how(code)}{why}")

    async def _start(self) -> Link[ToApiProcess, FromApiProcess]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await self._spawn(theirs)
            except BaseException:
                ours.close()
                raise
        return await open_link(ours, FromApiProcess, troupellm.__version__)

    async def _spawn(self, theirs: socket.socket) -> anyio.abc.Process:
        module = [sys.executable, "-m", MODULE]
        descriptors = (self._listener.fileno(), theirs.fileno())
        arguments = ["--listener", str(descriptors[0]), "--engine", str(descriptors[1]), "--parent", str(os.getpid())]
        return await anyio.open_process(
            [*module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None,
            stderr=None,  # its lines are lines of this server
            start_new_session=True,
            pass_fds=descriptors,
        )

    async def _live(self, link: Link[ToApiProcess, FromApiProcess]) -> None:
        """Until the link ends, with PeerGone when all is well."""
        link.post(self._parent.configure(self._number))
        if self._parent.progress is not None:
            link.post(Loading(self._parent.progress))
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._report_status, link)
            engine = self._parent.engine
            if engine is not None and engine.state != "stopped":
                self.serve(engine)
            try:
                with anyio.fail_after(GREETING_SECONDS):
                    message = await link.receive()
                self.linked = True
                while True:
                    self._on_message(message)
                    message = await link.receive()
            except TimeoutError:
                raise ApiProcessDied(f"it did not say a word for {GREETING_SECONDS:g} seconds") from None
            finally:
                self._group = None
                group.cancel_scope.cancel()

    async def _report_status(self, link: Link[ToApiProcess, FromApiProcess]) -> None:
        """Say how the engine is as long as the API process listens, and notice when it says nothing itself.

        Counted in turns of this loop and not in seconds: a process that was stopped itself has missed nothing.
        """
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch)
            while True:
                await link.drained()
                self.send_status()
                await anyio.sleep(STATUS_SECONDS)

    async def _watch(self) -> None:
        missed, last = 0, self.report
        while missed < DEAF_REPORTS or not self.linked:
            await anyio.sleep(STATUS_SECONDS)
            missed, last = (missed + 1 if self.report is last else 0), self.report
        raise ApiProcessDied(f"it has not been heard of for {DEAF_REPORTS * STATUS_SECONDS:g} seconds")

    def _on_message(self, message: FromApiProcess) -> None:
        match message:
            case Apply() | Submit() | Abort() | PauseReader() | ResumeReader() | AskCharge() | CorrectCharge():
                if self._session is None:
                    raise ApiProcessDied("it sent a request before there was an engine")
                self._session.handle(message)
            case ApiProcessReport():
                before, self.report = self.report, message
                self._parent.counted(message.counts)
                if (before.in_flight, before.draining) != (message.in_flight, message.draining):
                    self._parent.changed()
            case ApiProcessReady():
                self.ready = True
                self._parent.changed()
            case AskMetrics(query=query, compat=compat):
                try:
                    text = self._parent.metrics_text(compat=compat)
                except TroupeError:  # the engine is closing
                    text = b""
                self.post(MetricsText(query, text))
            case AskAdmin(query=query):
                assert self._group is not None
                self._asked[query] = anyio.CancelScope()  # now: it may be taken back by the very next message
                self._group.start_soon(self._administer, message)
            case CancelAdmin(query=query):
                if query in self._asked:
                    self._asked[query].cancel()
            case _:
                assert_never(message)

    async def _administer(self, asked: AskAdmin) -> None:
        answer: AdminAnswer | None = None
        with self._asked[asked.query]:
            try:
                body = await self._parent.admin_actions.act(asked.action, asked.arguments)
                answer = AdminAnswer(query=asked.query, body=body)
            except TroupeError as error:
                answer = AdminAnswer(query=asked.query, error=WireError.of(error))
        del self._asked[asked.query]
        if answer is not None:
            self.post(answer)

    async def _end(self, seconds: float) -> int | None:
        """The exit code of the process, which is killed after `seconds`."""
        if self._link is not None:
            await self._link.aclose()
        process: Any = self._process
        if process is None:
            return None
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(seconds):
                await process.wait()
            if process.returncode is None:
                process.kill()
            await process.wait()
            await process.aclose()
        return int(process.returncode)


def _how(code: int | None) -> str:
    if code is None:
        return ""
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"
