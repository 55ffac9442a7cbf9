"""Compiling guides in processes that only exist in the test: whose fault it is when one of them dies."""

import signal
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import anyio
import msgspec
import pytest

from troupellm.actors.guide import compiler as guide_compiler
from troupellm.actors.guide.actor import Guide
from troupellm.actors.guide.compiler import (
    MODULE,
    CompilerSettings,
    GuideRefused,
    GuideTooCostly,
    ProcessCompiler,
)
from troupellm.actors.runtime import compute_child
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.runtime.ports import SystemClock
from troupellm.protocol.config.structured_outputs import GuideConfig
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.messages.guide import GuideRequest
from troupellm.protocol.params.guide import BuildOutcome, EarlyEnd, GuideProgram, GuideSpec
from troupellm.protocol.wire.frames import Assembler, Codec
from troupellm.protocol.wire.guide_compiler import HELLO, Compile, Compiled, Prepare, Prepared, ToCompiler
from troupellm.tests.support.scheduler.oracle import submission
from troupellm.tests.support.scheduler.output_bench import Slot, opened

pytestmark = pytest.mark.anyio

SPEC = GuideSpec(kind="regex", source="a+")
_COMPILED = -1.0
SETTINGS = CompilerSettings(tokenizer_folder="", vocab_width=8, timeout=10.0, memory_bytes=1, depth=8)


class FakeChild:
    """Gets ready at once, and dies of guides and of backends as often as it is told."""

    pid = 1
    stopped = False

    def __init__(self, events: Any, deaths: list[int], used: Iterable[float | None] | None) -> None:
        """used: processor time, whenever it is asked for; the guide is compiled when there is no more of it."""
        self.events, self.deaths = events, deaths
        self.used = None if used is None else iter(used)
        self.code: int | None = None
        self._codec: Codec[Any] = Codec()
        self._assembler: Assembler[ToCompiler] = Assembler(ToCompiler, HELLO)
        self.say(HELLO)

    def send(self, data: bytes) -> None:
        for message in self._assembler.feed(data):
            if isinstance(message, Prepare):
                self.say(Prepared())
            elif self.used is not None:
                continue
            elif self.deaths:
                self.die(self.deaths.pop(0))
            else:
                self.say(Compiled(text="a program") if isinstance(message, Compile) else Prepared())

    def say(self, message: Any) -> None:
        self.events.received(self._codec.encode(message))

    def die(self, code: int) -> None:
        self.code = code
        self.events.closed()

    @property
    def cpu_seconds(self) -> float | None:
        if self.used is None:
            return 0.0
        used = next(self.used, _COMPILED)
        if used == _COMPILED:
            self.say(Compiled(text="a late program"))
        return used

    def kill(self) -> None:
        if self.code is None:
            self.die(-signal.SIGKILL)

    async def ended(self, timeout: float) -> int | None:
        return self.code


class FakeProcesses:
    """`deaths` are exit codes, of those that get a guide or a backend next."""

    def __init__(self, *deaths: int, out_of_memory: bool = False, used: Iterable[float | None] | None = None) -> None:
        """
        Args:
            out_of_memory: it is the kernel that kills.
            used: see `FakeChild`.
        """
        self.used = used
        self.deaths = list(deaths)
        self.out_of_memory = out_of_memory
        self.children: list[FakeChild] = []

    def oom_kills(self) -> int | None:
        return sum(child.code == -signal.SIGKILL for child in self.children) if self.out_of_memory else None

    async def start(self, module: str, events: Any) -> FakeChild:
        assert module == MODULE
        self.children.append(FakeChild(events, self.deaths, self.used))
        return self.children[-1]


class SlowProcesses(FakeProcesses):
    """They start when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_start = anyio.Event()

    async def start(self, module: str, events: Any) -> FakeChild:
        await self.may_start.wait()
        return await super().start(module, events)


async def test_a_process_that_somebody_kills_costs_no_guide() -> None:
    processes = FakeProcesses(-signal.SIGKILL)
    compiler = ProcessCompiler(SETTINGS, processes)
    assert (await compiler.compile(SPEC, "llguidance")).text == "a program"
    assert len(processes.children) == 2
    assert await compiler.close()


async def test_a_guide_waits_for_the_process_that_is_being_started() -> None:
    processes = SlowProcesses()
    compiler = ProcessCompiler(SETTINGS, processes)
    async with anyio.create_task_group() as group:
        group.start_soon(compiler.warm_up, 1)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(compiler.compile, SPEC, "llguidance")
        await anyio.wait_all_tasks_blocked()
        processes.may_start.set()
    assert len(processes.children) == 1
    assert await compiler.close()


async def test_marks_that_a_guide_waits_for_go_with_its_program() -> None:
    compiler = ProcessCompiler(SETTINGS, FakeProcesses())
    early = EarlyEnd(token="<b>", starts=("<s>",), opens="<m>", ends=("<b>",), recipient="to=")
    spec = GuideSpec(kind="json_object", after="<a>", early_end=early)
    program = await compiler.compile(spec, "llguidance")
    assert (program.after, program.early_end) == ("<a>", early)
    assert await compiler.close()


async def test_where_each_is_killed_the_guide_is_not_at_fault() -> None:
    processes = FakeProcesses(-signal.SIGKILL, -signal.SIGKILL)
    compiler = ProcessCompiler(SETTINGS, processes)
    with pytest.raises(EngineStopped) as caught:
        await compiler.compile(SPEC, "llguidance")
    assert (caught.value.code, caught.value.retryable) == ("engine_restarting", True)
    assert (await compiler.compile(SPEC, "llguidance")).text == "a program"
    assert await compiler.close()


async def test_a_guide_over_which_memory_ran_out_is_refused_for_now_and_not_tried_again_at_once() -> None:
    processes = FakeProcesses(-signal.SIGKILL, out_of_memory=True)
    compiler = ProcessCompiler(SETTINGS, processes)
    with pytest.raises(GuideTooCostly, match="memory"):
        await compiler.compile(SPEC, "llguidance")
    assert len(processes.children) == 1
    assert (await compiler.compile(SPEC, "llguidance")).text == "a program"
    assert await compiler.close()


@pytest.mark.parametrize("code", [1, -signal.SIGABRT, -signal.SIGSEGV])
async def test_a_guide_of_which_a_process_dies_is_refused(code: int) -> None:
    processes = FakeProcesses(code)
    compiler = ProcessCompiler(SETTINGS, processes)
    with pytest.raises(GuideRefused, match="memory"):
        await compiler.compile(SPEC, "llguidance")
    assert len(processes.children) == 1
    assert await compiler.close()


async def test_a_guide_that_no_process_saw_is_not_refused() -> None:
    processes = FakeProcesses(-signal.SIGABRT)  # of the backend
    compiler = ProcessCompiler(SETTINGS, processes)
    with pytest.raises(EngineStopped):
        await compiler.compile(SPEC, "xgrammar")
    assert (await compiler.compile(SPEC, "xgrammar")).backend == "xgrammar"
    assert await compiler.close()


HASTY = msgspec.structs.replace(SETTINGS, timeout=0.02)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine stops a test, what a guide waits for in vain is processor time alone."""
    monkeypatch.setattr(guide_compiler, "PATIENCE", 1e9)
    monkeypatch.setattr(guide_compiler, "MOST_PATIENCE_SECONDS", 1e9)


@pytest.mark.usefixtures("patient")
async def test_a_guide_is_waited_for_while_its_process_gets_no_processor() -> None:
    processes = FakeProcesses(used=[0.0, 0.0, 0.015, 0.019])
    compiler = ProcessCompiler(HASTY, processes)
    assert (await compiler.compile(SPEC, "llguidance")).text == "a late program"
    assert (len(processes.children), compiler.num_killed) == (1, 0)
    assert await compiler.close()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("used", [[1.0, 1.0, 1.02], [None, None], [1.0, None]])
async def test_a_guide_that_has_had_its_time_is_refused(used: list[float | None]) -> None:
    compiler = ProcessCompiler(HASTY, FakeProcesses(used=used))
    with pytest.raises(GuideTooCostly, match=r"longer than 0\.02 s"):
        await compiler.compile(SPEC, "llguidance")
    assert compiler.num_killed == 1
    assert await compiler.close()


@pytest.mark.parametrize(("times", "more"), [(1, 1e9), (1e9, 0.01)])
async def test_a_guide_whose_process_never_gets_a_processor_is_not_at_fault(
    times: float, more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_compiler, "PATIENCE", times)
    monkeypatch.setattr(guide_compiler, "MOST_PATIENCE_SECONDS", more)
    compiler = ProcessCompiler(HASTY, FakeProcesses(used=repeat(0.0)))
    with pytest.raises(EngineStopped) as caught:
        await compiler.compile(SPEC, "llguidance")
    assert (caught.value.code, caught.value.retryable, compiler.num_killed) == ("engine_restarting", True, 1)
    assert await compiler.close()


async def test_a_guide_that_may_take_long_is_waited_for_as_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else, on a machine that others keep busy too, it could never have what it may take."""
    monkeypatch.setattr(guide_compiler, "MOST_PATIENCE_SECONDS", 0.01)
    waits = []

    def move_on_after(seconds: float) -> anyio.CancelScope:
        waits.append(seconds)
        return anyio.CancelScope()

    monkeypatch.setattr(compute_child.anyio, "move_on_after", move_on_after)
    for timeout in (0.001, 0.005, 60.0):
        compiler = ProcessCompiler(msgspec.structs.replace(SETTINGS, timeout=timeout), FakeProcesses())
        await compiler.compile(SPEC, "llguidance")
        assert await compiler.close()
    assert waits[::2] == pytest.approx([0.01, 0.015, 120.0])


@pytest.mark.parametrize("limit", ["of the guide", "of the wait"])
async def test_an_answer_that_comes_as_the_wait_ends_is_taken(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an event loop was held up: it looks at its timers first, and then at its sockets."""
    processes = FakeProcesses(used=[0.0, 1.0])

    class LateWaiter:
        async def wait(self, timeout: float | None = None) -> bool:
            try:
                await anyio.sleep_forever()
            finally:
                processes.children[0].say(Compiled(text="just in time"))

        def wake(self) -> None:
            pass

    monkeypatch.setattr(guide_compiler, "PATIENCE", 1e9 if limit == "of the guide" else 0.5)
    monkeypatch.setattr(guide_compiler, "MOST_PATIENCE_SECONDS", 1e9)
    monkeypatch.setattr(compute_child, "new_waiter", LateWaiter)
    compiler = ProcessCompiler(HASTY, processes)
    assert (await compiler.compile(SPEC, "llguidance")).text == "just in time"
    assert (len(processes.children), compiler.num_killed) == (1, 0)
    assert await compiler.close()


async def built(program: GuideProgram) -> BuildOutcome:
    """By the worker."""
    return "built"


async def test_the_first_guide_has_a_second_process_started_beside_its_own() -> None:
    """A small guide that comes with large ones must not wait until a process has started."""
    processes = FakeProcesses()
    compiler = ProcessCompiler(SETTINGS, processes)
    boxes: list[Mailbox[Any, Any]] = [Mailbox(name, 8) for name in ("guide", "output", "scheduler")]
    guide = Guide(*boxes, compiler, built, GuideConfig(), SystemClock(), warm=True)
    async with anyio.create_task_group() as group:
        group.start_soon(guide.run)
        await anyio.wait_all_tasks_blocked()
        assert len(processes.children) == 1
        await boxes[0].put(GuideRequest(spec=SPEC, opened=opened(Slot()), submitted=submission(1, [5])))
        await anyio.wait_all_tasks_blocked()
        assert len(processes.children) == compiler.parallel == 2
        boxes[0].close()
    assert await compiler.close()
