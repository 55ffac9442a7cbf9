"""Supervision: who restarts, who escalates, and that everything owed is answered with the root cause."""

from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.restart_intensity import Intensity
from troupellm.actors.runtime.supervise import Child, Supervisor
from troupellm.tests.support.environment.hand_clock import HandClock

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(any_backend: object) -> object:
    return any_backend


async def settle() -> None:
    """Let everything that can happen now happen; a crash takes a few rounds of the loop to reach its supervisor."""
    for _ in range(30):
        await checkpoint()


class Echo:
    """Notes what it is told; the word "crash" makes it raise."""

    def __init__(self, inbox: Mailbox[str, str], heard: list[str]) -> None:
        self._inbox = inbox
        self._heard = heard

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while await self._inbox.wait():
            while (message := self._inbox.take()) is not None:
                if message == "crash":
                    raise ValueError("asked to crash")
                self._heard.append(message)


class Stage:
    """One supervised company of echoes."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.heard: list[str] = []
        self.answered: list[tuple[str, str, list[Any]]] = []
        self.boxes: dict[str, Mailbox[str, str]] = {}

    def child(self, name: str, **options: Any) -> Child:
        box: Mailbox[str, str] = Mailbox(name, 8)
        self.boxes[name] = box

        def answer(cause: Exception, owed: list[Any]) -> None:
            self.answered.append((name, str(cause), owed))

        return Child(name=name, build=lambda: Echo(box, self.heard), mailboxes=(box,), on_crash=answer, **options)

    async def play(self, children: list[Child], script: Callable[[], None], **options: Any) -> Supervisor:
        supervisor = Supervisor(children, self.clock, **options)
        async with anyio.create_task_group() as group:
            await group.start(supervisor.run)
            script()
            await settle()
            for box in self.boxes.values():
                box.close()
        return supervisor


async def test_a_crashed_child_restarts_and_what_it_owed_is_answered() -> None:
    stage = Stage()
    children = [stage.child("a", strategy="restart"), stage.child("b")]

    def script() -> None:
        for message in ("one", "crash", "still there"):
            stage.boxes["a"].offer(message)
        stage.boxes["b"].offer("other")

    async def later() -> None:
        await settle()

    supervisor = Supervisor(children, stage.clock)
    async with anyio.create_task_group() as group:
        await group.start(supervisor.run)
        script()
        await later()
        stage.boxes["a"].offer("again")
        await later()
        for box in stage.boxes.values():
            box.close()
    assert sorted(stage.heard) == ["again", "one", "other", "still there"]
    assert stage.answered == [("a", "asked to crash", ["crash"])]
    assert supervisor.restarts == {"a": 1, "b": 0}


async def test_a_child_that_may_not_restart_ends_everything_with_the_cause_itself() -> None:
    stage = Stage()
    children = [stage.child("a"), stage.child("b", strategy="restart")]
    with pytest.raises(ValueError, match="asked to crash") as caught:
        await _flat(Supervisor(children, stage.clock), lambda: stage.boxes["a"].offer("crash"))
    assert caught.value.__notes__ == ["actor: a", "hint: see the traceback"]
    assert stage.answered == [("a", "asked to crash", ["crash"])]


async def _flat(supervisor: Supervisor, script: Callable[[], object]) -> None:
    """Run the supervisor in this task, so that what it raises arrives unwrapped."""
    async with anyio.create_task_group() as group:

        async def later() -> None:
            await settle()
            script()

        group.start_soon(later)
        failure: Exception | None = None
        try:
            await supervisor.run()
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


async def test_too_many_crashes_escalate() -> None:
    stage = Stage()
    child = stage.child("a", strategy="restart")
    supervisor = Supervisor([child], stage.clock, Intensity(restarts=2, seconds=10.0))
    with pytest.raises(ValueError, match="asked to crash"):
        await _flat_many(supervisor, stage, [0.0, 1.0, 2.0])
    assert supervisor.restarts == {"a": 2}
    assert len(stage.answered) == 3


async def _flat_many(supervisor: Supervisor, stage: Stage, times: list[float]) -> None:
    async def crash() -> None:
        for time in times:
            await settle()
            stage.clock.time = time
            stage.boxes["a"].offer("crash")
        await settle()
        stage.boxes["a"].close()

    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(crash)
        try:
            await supervisor.run()
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


async def test_crashes_far_apart_do_not_add_up() -> None:
    stage = Stage()
    supervisor = Supervisor([stage.child("a", strategy="restart")], stage.clock, Intensity(restarts=1, seconds=10.0))
    await _flat_many(supervisor, stage, [0.0, 20.0, 40.0])
    assert supervisor.restarts == {"a": 3}


async def test_a_group_falls_and_rises_together() -> None:
    stage = Stage()
    children = [stage.child(name, strategy="restart", group="pair") for name in ("a", "b")]

    def script() -> None:
        stage.boxes["a"].offer("crash")

    supervisor = await stage.play(children, script)
    assert supervisor.restarts == {"a": 1, "b": 1}
    assert [name for name, _, _ in stage.answered] == ["a", "b"]


async def test_a_crash_before_the_handshake_escalates_like_any_other() -> None:
    class Broken:
        async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
            raise OSError("no device")

    child = Child(name="broken", build=Broken, on_crash=lambda cause, owed: None)
    with pytest.raises(OSError, match="no device") as caught:
        await Supervisor([child], HandClock()).run()
    assert caught.value.__notes__ == ["actor: broken", "hint: see the traceback"]


async def test_an_actor_that_returns_with_its_mailbox_open_has_crashed() -> None:
    stage = Stage()
    child = stage.child("a", strategy="restart")

    class Leaver:
        async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
            task_status.started()

    builds = [Leaver(), child.build()]
    supervisor = Supervisor([msgspec.structs.replace(child, build=lambda: builds.pop(0))], stage.clock)
    async with anyio.create_task_group() as group:
        await group.start(supervisor.run)
        await settle()
        stage.boxes["a"].offer("heard")
        await settle()
        stage.boxes["a"].close()
    assert stage.heard == ["heard"]
    assert supervisor.restarts == {"a": 1}
    assert "mailbox is open" in stage.answered[0][1]


async def test_an_actor_that_is_cancelled_alone_has_crashed() -> None:
    stage = Stage()
    child = stage.child("a", strategy="restart")
    scopes: list[anyio.CancelScope] = []

    class Cancellable:
        async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await child.build().run(task_status=task_status)

    supervisor = Supervisor([msgspec.structs.replace(child, build=Cancellable)], stage.clock)
    async with anyio.create_task_group() as group:
        await group.start(supervisor.run)
        scopes[0].cancel()
        await settle()
        stage.boxes["a"].offer("heard")
        await settle()
        stage.boxes["a"].close()
    assert stage.heard == ["heard"]
    assert supervisor.restarts == {"a": 1}


async def test_cancelling_the_scope_cancels_the_tree() -> None:
    stage = Stage()
    children = [stage.child("a", strategy="restart"), stage.child("b")]
    supervisor = Supervisor(children, stage.clock)
    async with anyio.create_task_group() as group:
        await group.start(supervisor.run)
        group.cancel_scope.cancel()
    assert stage.answered == []
