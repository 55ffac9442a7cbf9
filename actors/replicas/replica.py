"""One engine process of a fleet: the process, the link to it, and the requests that are there.

Owns:      one child process at a time, and its place in the chooser.
Receives:  frames of the engine's process.
Sends:     frames to it.
On crash:  the fleet moves its requests, and the process is started again, a bounded number of times.
"""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol

import anyio
import anyio.abc
import msgspec

from troupellm import __version__
from troupellm.actors.remote.queries import Queries
from troupellm.actors.replicas.chooser import Place
from troupellm.actors.replicas.request import FleetRequest
from troupellm.actors.runtime.link import FrameError, Link, PeerGone, open_link
from troupellm.actors.runtime.ports import Clock
from troupellm.actors.runtime.restart_intensity import Crashes, Intensity
from troupellm.protocol.errors import EngineStopped, TroupeError
from troupellm.protocol.wire.api_process import AdminAnswer, MetricsText, Serving, Status
from troupellm.protocol.wire.replica import FromReplica, ReplicaFailed, StartReplica, StopReplica, ToReplica

logger = logging.getLogger("troupellm.server")

INTENSITY = Intensity(restarts=5, seconds=600.0)
"""One that dies more often is given up; the others serve on."""
GREETING_SECONDS = 60.0
"""From the start of a process to its first word: a loaded machine takes seconds to import an engine."""
REPORT_SECONDS = 0.25
DEAF_REPORTS = 60
"""A process that misses so many of its reports in a row (15 s) hangs, and is replaced. Counted in turns of this loop: a
fleet that was stopped itself has missed nothing."""
END_SECONDS = 5.0
"""Seconds that a process has to end after it was told to; then it is killed."""
RETRY_SECONDS = 0.5

State = Literal["starting", "ready", "leaving", "failed", "stopped"]


class Child(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...

    async def aclose(self) -> None: ...


Spawn = Callable[[socket.socket, Mapping[str, str]], Awaitable[Child]]
"""Starts an engine process, given its end of a socket pair and the variables that its environment has beside ours."""


class Owner(Protocol):
    """The fleet."""

    def on_message(self, replica: "Replica", message: FromReplica) -> None: ...

    def on_change(self) -> None:
        """A replica is ready, or not any more."""

    def on_lost(self, replica: "Replica") -> None:
        """Its process is gone, and with it all that was there."""


class Replica:
    def __init__(self, owner: Owner, number: int, start: StartReplica, spawn: Spawn, clock: Clock) -> None:
        self._owner = owner
        self._start = start
        self._spawn = spawn
        self._clock = clock
        self.number = number
        self.state: State = "starting"
        self.reason = "it is starting"
        """Why it is not ready."""
        self.failure: TroupeError | None = None
        """Why it could not load the model, or was given up."""
        self.restarts = 0
        self.serving: Serving | None = None
        self.status: Status | None = None
        self.place: Place | None = None
        self.queries = Queries(self.post)
        self.requests: dict[int, FleetRequest] = {}
        """Those that are there, by their number there."""
        self._link: Link[ToReplica, FromReplica] | None = None
        self._process: Child | None = None
        self._heard = 0
        self._silence = ""
        """Why its process was killed, if it was."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def linked(self) -> bool:
        """It has a process to which things can be said."""
        return self._link is not None

    @property
    def unready(self) -> str | None:
        """Why requests had better go to another replica just now; None when all is well."""
        if self.state != "ready":
            return self.reason
        return None if self.status is None else self.status.snapshot.unready

    @property
    def failed(self) -> bool:
        return self.state == "failed"

    def post(self, message: ToReplica) -> None:
        """Queue a message; one for a process that is gone is forgotten."""
        if self._link is not None:
            self._link.post(message)

    def stop(self) -> None:
        """End the process. It is started again unless its owner leaves the fleet. One between two processes has none to
        end: its next one is new."""
        if self._link is None:
            return
        if self.state in ("ready", "starting"):
            self.state, self.reason = "leaving", "it is restarting"
        self.post(StopReplica())

    async def run(self) -> None:
        """Until cancelled, or until it is given up."""
        crashes = Crashes(INTENSITY, self._clock)
        while True:
            try:
                why = await self._live()
            except BaseException:
                await self._end(END_SECONDS if self.state == "leaving" else 0.0)
                raise
            asked, loaded, requests = self.state == "leaving", self.serving is not None, len(self.requests)
            verb = "could not be started" if self._process is None else "ended"
            self._lose("it is restarting" if asked else f"its process {verb}{why}")
            ended = f"{verb}{_how(await self._end(END_SECONDS if asked else 0.0))}{why}"
            if not asked:
                self.reason = f"its process {ended}"
            given_up = not asked and (crashes.add() or not (loaded or self.restarts))
            if given_up:
                self.state = "failed"
                text = f"replica {self.number}: its process {ended}"
                self.failure = self.failure or EngineStopped(text, code="engine_failed")
            if not asked:
                logger.error("replica %d: its process %s; it had %d requests", self.number, ended, requests)
            if given_up:
                self._owner.on_change()
                return
            self.restarts += 1
            if not asked:
                await anyio.sleep(RETRY_SECONDS)

    def _lose(self, reason: str) -> None:
        """Nothing is said here any more: its requests move, before the process has ended."""
        self.state, self.reason = "starting", reason
        self.serving = self.status = self.place = None
        self.queries.lost()
        self.queries = Queries(self.post)
        self._owner.on_lost(self)

    async def _live(self) -> str:
        """One process, from its start until nothing comes from it any more; more about why."""
        why, self._silence, self._heard = "", "", 0
        try:
            self._link = await self._connect()
        except OSError as error:  # no descriptors, no memory: a crash like another
            return f": {error}"
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, group.cancel_scope)
            why = await self._follow(self._link)
            group.cancel_scope.cancel()
        return why or self._silence

    async def _connect(self) -> Link[ToReplica, FromReplica]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await self._spawn(theirs, device_of(self.number, os.environ))
            except BaseException:
                ours.close()
                raise
        link: Link[ToReplica, FromReplica] = await open_link(ours, FromReplica, __version__)
        link.post(self._start)
        return link

    async def _follow(self, link: Link[ToReplica, FromReplica]) -> str:
        """Take what it says until it ends; more about why."""
        try:
            with anyio.fail_after(GREETING_SECONDS):
                message = await link.receive()
            while True:
                self._heard += 1
                self._take(message)
                message = await link.receive()
        except PeerGone:
            return ""
        except TimeoutError:
            return f": it did not say a word for {GREETING_SECONDS:g} seconds"
        except FrameError as error:
            return f": {error}"

    async def _watch(self, scope: anyio.CancelScope) -> None:
        missed, last = 0, 0
        while missed < DEAF_REPORTS or not last:
            await anyio.sleep(REPORT_SECONDS)
            missed, last = (missed + 1 if self._heard == last else 0), self._heard
        self._silence = f": it had not been heard of for {DEAF_REPORTS * REPORT_SECONDS:g} seconds"
        scope.cancel()

    def _take(self, message: FromReplica) -> None:
        match message:
            case Status():
                self.status = message
            case Serving(ready=ready):
                self.serving = message
                self.place = Place(self.number, ready.block_size, ready.num_blocks)
                if self.state == "starting":
                    self.state, self.reason, self.failure = "ready", "", None
                self._owner.on_change()
            case ReplicaFailed(error=error):
                self.failure = error.error()
            case MetricsText() | AdminAnswer():
                self.queries.answered(message)
            case _:
                self._owner.on_message(self, message)

    async def _end(self, seconds: float) -> int | None:
        """Close the link; the exit code of the process, which is killed after `seconds`. None where it does not end."""
        link, self._link = self._link, None
        process, self._process = self._process, None
        if link is not None:
            await link.aclose()
        if process is None:
            return None
        with anyio.CancelScope(shield=True):
            if seconds:
                with anyio.move_on_after(seconds):
                    await process.wait()
            if process.returncode is None:
                process.kill()
            with anyio.move_on_after(END_SECONDS):  # one in a call of a driver may not end though it was killed
                await process.wait()
            if process.returncode is not None:
                await process.aclose()
        return process.returncode


async def spawn_process(module: str, theirs: socket.socket, variables: Mapping[str, str]) -> anyio.abc.Process:
    """Implements `Spawn`.

    Args:
        module: the program of an engine process.
    """
    descriptor = theirs.fileno()
    return await anyio.open_process(
        [sys.executable, "-m", module, "--fleet", str(descriptor), "--parent", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=None,
        stderr=None,  # its lines are lines of this server
        start_new_session=True,
        pass_fds=(descriptor,),
        env={**os.environ, **variables},
    )


def device_of(number: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that give a replica a GPU of its own, of those that this process may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(number)}
    names = [name for name in visible.split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": names[number] if number < len(names) else ""}


def with_rank(start: StartReplica, number: int) -> StartReplica:
    """A start for one replica, with its share of the machine's cores."""
    config = start.config
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = config.worker.num_threads or max(1, cores // config.parallel.data_parallel_size)
    parallel = msgspec.structs.replace(config.parallel, data_parallel_size=1, data_parallel_rank=number)
    worker = msgspec.structs.replace(config.worker, num_threads=threads)
    return msgspec.structs.replace(start, config=msgspec.structs.replace(config, parallel=parallel, worker=worker))


def _how(code: int | None) -> str:
    if code is None:
        return ""
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"
