"""Compiling guides in processes that only exist in the test: whose fault it is when one of them dies."""

import signal
from typing import Any

import pytest

from troupellm.actors.guide_compiler import (
    MODULE,
    CompilerSettings,
    GuideRefused,
    GuideTooCostly,
    ProcessCompiler,
)
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.frames import Assembler, Codec
from troupellm.protocol.guide import EarlyEnd, GuideSpec
from troupellm.protocol.guide_link import HELLO, Compile, Compiled, Prepare, Prepared, ToCompiler

pytestmark = pytest.mark.anyio

SPEC = GuideSpec(kind="regex", source="a+")
SETTINGS = CompilerSettings(tokenizer_folder="", vocab_width=8, timeout=10.0, memory_bytes=1, depth=8)


class FakeChild:
    """Gets ready at once, and dies of guides and of backends as often as it is told."""

    pid = 1
    stopped = False

    def __init__(self, events: Any, deaths: list[int]) -> None:
        self.events, self.deaths = events, deaths
        self.code: int | None = None
        self._codec: Codec[Any] = Codec()
        self._assembler: Assembler[ToCompiler] = Assembler(ToCompiler, HELLO)
        self.say(HELLO)

    def send(self, data: bytes) -> None:
        for message in self._assembler.feed(data):
            if isinstance(message, Prepare):
                self.say(Prepared())
            elif self.deaths:
                self.die(self.deaths.pop(0))
            else:
                self.say(Compiled(text="a program") if isinstance(message, Compile) else Prepared())

    def say(self, message: Any) -> None:
        self.events.received(self._codec.encode(message))

    def die(self, code: int) -> None:
        self.code = code
        self.events.closed()

    def kill(self) -> None:
        if self.code is None:
            self.die(-signal.SIGKILL)

    async def ended(self, timeout: float) -> int | None:
        return self.code


class FakeProcesses:
    """`deaths` are exit codes, of those that get a guide or a backend next."""

    def __init__(self, *deaths: int, out_of_memory: bool = False) -> None:
        """out_of_memory: it is the kernel that kills."""
        self.deaths = list(deaths)
        self.out_of_memory = out_of_memory
        self.children: list[FakeChild] = []

    def oom_kills(self) -> int | None:
        return sum(child.code == -signal.SIGKILL for child in self.children) if self.out_of_memory else None

    async def start(self, module: str, events: Any) -> FakeChild:
        assert module == MODULE
        self.children.append(FakeChild(events, self.deaths))
        return self.children[-1]


async def test_a_process_that_somebody_kills_costs_no_guide() -> None:
    processes = FakeProcesses(-signal.SIGKILL)
    compiler = ProcessCompiler(SETTINGS, processes)
    assert (await compiler.compile(SPEC, "llguidance")).text == "a program"
    assert len(processes.children) == 2
    assert await compiler.close()


async def test_what_a_guide_waits_for_goes_with_its_program() -> None:
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
