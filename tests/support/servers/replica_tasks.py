"""Engine processes of a fleet as tasks of the test's own event loop: only the processes are replaced."""

import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count

import anyio
import anyio.abc

import troupellm
from troupellm.actors.runtime.link import PeerGone, open_link
from troupellm.protocol.wire.replica import StartReplica, ToReplica
from troupellm.server.replica_process.main import ReplicaProcess

KILLED = -9


class TaskChild:
    """One of them. `kill` cuts its socket first, so that nothing is said any more."""

    def __init__(self, pid: int, wire: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._wire = wire
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    async def live(self, peer: socket.socket) -> None:
        code = KILLED
        try:
            with self._scope:
                link = await open_link(peer, ToReplica, troupellm.__version__)
                try:
                    start = await link.receive()
                    assert isinstance(start, StartReplica)
                    code = await ReplicaProcess(link, start).run()
                except PeerGone:
                    code = 1
                finally:
                    await link.aclose()
        finally:
            self.returncode = code
            self._wire.close()
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self._wire.shutdown(socket.SHUT_RDWR)
            self._scope.cancel()

    async def aclose(self) -> None:
        pass


class ReplicaTasks:
    """Implements `Spawn`."""

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self._pids = count(1)
        self.children: dict[int, TaskChild] = {}
        """By pid."""

    async def __call__(self, theirs: socket.socket, variables: Mapping[str, str]) -> TaskChild:
        wire, peer = (socket.socket(fileno=os.dup(theirs.fileno())) for _ in range(2))
        child = TaskChild(next(self._pids), wire)
        self.children[child.pid] = child
        self._group.start_soon(child.live, peer)
        return child


@asynccontextmanager
async def replica_tasks() -> AsyncIterator[ReplicaTasks]:
    """Around the fleet's life. An exception of the block is raised as it is, and not in a group."""
    failures: list[Exception] = []
    async with anyio.create_task_group() as group:
        try:
            yield ReplicaTasks(group)
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
