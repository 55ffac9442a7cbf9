"""Faults of a fleet beside the death of a replica: what cannot be started, moved or told costs no stream of another."""

import asyncio
import errno
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm.actors.replicas import replica as replicas
from troupellm.actors.replicas.fleet import Fleet
from troupellm.protocol.config.kv_hints import KVHints
from troupellm.protocol.errors import EngineOverloaded, EngineStopped
from troupellm.protocol.wire.api_process import Apply, Ended, WireError
from troupellm.tests.faults.test_R_replicas import LENGTH, config, fleet_of, kill, prompt, sampling
from troupellm.tests.support.servers.replica_tasks import TaskChild, replica_tasks
from troupellm.tests.support.servers.serving import SPARE_SECONDS, eventually, server_config

pytestmark = pytest.mark.anyio


async def test_a_process_that_cannot_be_started_is_tried_again(checkpoint: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.05)
    failures = 0
    async with replica_tasks() as tasks:

        async def spawn(theirs: socket.socket, variables: Mapping[str, str]) -> Any:
            nonlocal failures
            if 0 < failures < 3:
                failures += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return await tasks(theirs, variables)

        async with Fleet(config(checkpoint), server_config(), spawn) as fleet:
            failures = 1
            kill(fleet, 0)
            await eventually(lambda: "could not be started" in fleet.replicas[0].reason)
            await eventually(lambda: fleet.replicas[0].state == "ready", SPARE_SECONDS)
            assert failures == 3


async def test_a_fault_on_the_way_to_another_replica_fails_one_request(checkpoint: Any, monkeypatch: Any) -> None:
    async with fleet_of(checkpoint) as fleet:
        async with fleet.stream(prompt(1), **sampling(1), hints=KVHints(replica=0)) as stream:
            await anext(stream)
            with monkeypatch.context() as patch:
                patch.setattr(fleet._router, "_choose", lambda *_: 1 // 0)
                kill(fleet, 0)
                with pytest.raises(EngineStopped, match="could not be moved"):
                    async for _ in stream:
                        pass
        assert (await fleet.generate([5, 6], max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3


async def test_a_restart_while_a_replica_has_no_process_waits_for_its_next_one(checkpoint: Any) -> None:
    async with fleet_of(checkpoint) as fleet:
        kill(fleet, 0)
        await eventually(lambda: fleet.replicas[0].restarts == 1)
        assert not fleet.replicas[0].linked
        with anyio.fail_after(SPARE_SECONDS):
            await fleet.restart()
        assert [each.state for each in fleet.replicas] == ["ready", "ready"]
        assert [each.restarts for each in fleet.replicas] == [1, 1]


async def test_a_restart_ends_at_a_replica_that_does_not_come_back(
    checkpoint: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.05)
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    async with fleet_of(folder) as fleet:
        (folder / "config.json").write_text("{}")
        with pytest.raises(EngineStopped, match="replica 0 did not come back: .*; those after it were not restarted"):
            await fleet.administer("restart_replicas", b"{}")
        assert [each.state for each in fleet.replicas] == ["failed", "ready"]
        assert (await fleet.generate([5, 6], max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3


async def test_a_request_that_a_failing_replica_refuses_goes_to_another_one(checkpoint: Any, monkeypatch: Any) -> None:
    async with fleet_of(checkpoint) as fleet:
        replica = fleet.replicas[0]
        post, loop = replica.post, asyncio.get_running_loop()

        def refuse(message: Any) -> None:
            if isinstance(message, Apply):
                error = WireError.of(EngineStopped("the engine has failed", code="engine_failed"))
                loop.call_soon(fleet.on_message, replica, Ended(request=message.request, error=error))
            else:
                post(message)

        monkeypatch.setattr(replica, "post", refuse)
        answer = await fleet.generate([5, 6], max_tokens=3, ignore_eos=True, hints=KVHints(replica=0))
        assert answer.usage.completion_tokens == 3
        assert (replica.state, replica.reason) == ("starting", "the engine has failed")


async def test_a_stream_older_than_the_queue_timeout_moves(checkpoint: Any) -> None:
    async with fleet_of(checkpoint, queue_timeout=0.5, stream_budget_tokens=64) as fleet:
        async with fleet.stream(prompt(1), **sampling(1), hints=KVHints(replica=0)) as stream:
            tokens = len((await anext(stream)).token_ids)
            await anyio.sleep(0.7)
            kill(fleet, 0)
            async for delta in stream:
                tokens += len(delta.token_ids)
        assert tokens == LENGTH


async def test_a_request_that_does_not_wait_is_refused_by_a_full_fleet(checkpoint: Any) -> None:
    async def never(*_: Any) -> Any:
        await anyio.sleep_forever()

    async with fleet_of(checkpoint, max_num_seqs=1, max_num_queued_reqs=0) as fleet:
        fleet.replicas[1]._spawn = never
        kill(fleet, 1)
        await eventually(lambda: fleet.replicas[1].state == "starting")
        async with fleet.stream([5, 6], max_tokens=1500, ignore_eos=True, wait=False) as stream:
            await anext(stream)
            with anyio.fail_after(SPARE_SECONDS), pytest.raises(EngineOverloaded):
                await fleet.generate([5, 6], max_tokens=1500, ignore_eos=True, wait=False)
            await stream.cancel()


async def test_requests_move_before_a_dead_process_has_been_waited_for(checkpoint: Any, monkeypatch: Any) -> None:
    ended = anyio.Event()
    wait = TaskChild.wait

    async def slow(child: TaskChild) -> int:
        await ended.wait()
        return await wait(child)

    async with fleet_of(checkpoint) as fleet:
        async with fleet.stream(prompt(1), **sampling(1), hints=KVHints(replica=0)) as stream:
            tokens = len((await anext(stream)).token_ids)
            with monkeypatch.context() as patch:
                patch.setattr(TaskChild, "wait", slow)
                kill(fleet, 0)
                async for delta in stream:
                    tokens += len(delta.token_ids)
                assert fleet.replicas[0].restarts == 0
            assert tokens == LENGTH
        ended.set()
        await eventually(lambda: fleet.replicas[0].state == "ready", SPARE_SECONDS)


async def test_a_second_process_may_load_as_long_as_a_first_one(checkpoint: Any, monkeypatch: Any) -> None:
    """A process that has not said a word yet hangs no sooner than its greeting is due."""
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(replicas, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(replicas, "DEAF_REPORTS", 20)
    children: list[Any] = []
    async with replica_tasks() as tasks:

        async def spawn(theirs: socket.socket, variables: Mapping[str, str]) -> Any:
            if len(children) < 2:
                children.append(await tasks(theirs, variables))
            else:
                children.append(LateChild(tasks, socket.socket(fileno=os.dup(theirs.fileno())), variables))
            return children[-1]

        async with Fleet(config(checkpoint), server_config(), spawn) as fleet:
            kill(fleet, 0)
            await eventually(lambda: len(children) == 3)
            late = children[2]
            assert isinstance(late, LateChild)
            await anyio.sleep(1.3 * replicas.DEAF_REPORTS * replicas.REPORT_SECONDS)
            assert (late.killed, fleet.replicas[0].restarts) == (False, 1)
            await late.begin()
            await eventually(lambda: fleet.replicas[0].state == "ready", SPARE_SECONDS)
            assert fleet.replicas[0].restarts == 1


async def test_a_killed_process_that_does_not_end_is_left_behind(checkpoint: Any, monkeypatch: Any) -> None:
    """One in a call of a driver may not end though it was killed; its replica has another one all the same."""
    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(replicas, "END_SECONDS", 0.1)
    children: list[StuckChild] = []
    async with replica_tasks() as tasks:

        async def spawn(theirs: socket.socket, variables: Mapping[str, str]) -> Any:
            children.append(StuckChild(await tasks(theirs, variables)))
            return children[-1]

        async with Fleet(config(checkpoint), server_config(), spawn) as fleet:
            kill(fleet, 0)
            await eventually(lambda: len(children) == 3)
            assert fleet.replicas[0].reason == "its process ended"
            await eventually(lambda: fleet.replicas[0].state == "ready", SPARE_SECONDS)


class LateChild:
    """A process that says nothing before `begin`."""

    pid, returncode = 77, None

    def __init__(self, tasks: Any, theirs: socket.socket, variables: Mapping[str, str]) -> None:
        self._tasks, self._theirs, self._variables = tasks, theirs, variables
        self._child: TaskChild | None = None
        self.killed = False

    async def begin(self) -> None:
        with self._theirs:
            self._child = await self._tasks(self._theirs, self._variables)

    def kill(self) -> None:
        self.killed = True
        if self._child is not None:
            self._child.kill()

    async def wait(self) -> int:
        return 0 if self._child is None else await self._child.wait()

    async def aclose(self) -> None:
        pass


class StuckChild:
    """A process that answers to no signal and is never waited for with success."""

    returncode = None

    def __init__(self, child: TaskChild) -> None:
        self._child, self.pid = child, child.pid

    def kill(self) -> None:
        self._child.kill()

    async def wait(self) -> int:
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        raise AssertionError("it has not ended")
