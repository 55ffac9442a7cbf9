"""How long a guide stays refused: for good where it is at fault, for a while where the machine may have been."""

from typing import Any

import anyio
import pytest

from troupellm.actors.guide.actor import COSTLY_SECONDS, Guide
from troupellm.actors.guide.compiler import GuideRefused, GuideTooCostly
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.protocol.config.structured_outputs import GuideConfig
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.guide import BuildGuide, GuideRequest
from troupellm.protocol.messages.scheduler import GuideBuilt, SubmitRequest
from troupellm.protocol.params.guide import BuildOutcome, GuideProgram, GuideSpec
from troupellm.tests.support.environment.hand_clock import HandClock
from troupellm.tests.support.scheduler.oracle import submission
from troupellm.tests.support.scheduler.output_bench import Slot, opened

pytestmark = pytest.mark.anyio

SPEC = GuideSpec(kind="regex", source="a+")


class FakeCompiler:
    """Refuses the first guide that it gets."""

    parallel = 1

    def __init__(self, refusal: GuideRefused) -> None:
        self.refusals = [refusal]
        self.calls = 0

    async def compile(self, spec: GuideSpec, backend: str) -> GuideProgram:
        self.calls += 1
        if self.refusals:
            raise self.refusals.pop()
        return GuideProgram(backend=backend, text="a program", after=spec.after)

    async def warm_up(self, processes: int) -> None:
        """It is ready."""


async def prepared(program: GuideProgram) -> BuildOutcome:
    """By the worker."""
    return "built"


@pytest.mark.parametrize(("kind", "calls"), [(GuideTooCostly, 2), (GuideRefused, 1)])
async def test_a_guide_that_was_too_costly_gets_another_try_after_a_while(kind: type[GuideRefused], calls: int) -> None:
    clock, compiler = HandClock(), FakeCompiler(kind("it does not do"))
    boxes: list[Mailbox[Any, Any]] = [Mailbox(name, 8) for name in ("guide", "output", "scheduler")]
    guide = Guide(*boxes, compiler, prepared, GuideConfig(), clock, warm=False)

    async def ask() -> Slot:
        slot = Slot()
        await boxes[0].put(GuideRequest(spec=SPEC, opened=opened(slot), submitted=submission(1, [5])))
        await anyio.wait_all_tasks_blocked()
        return slot

    async with anyio.create_task_group() as group:
        group.start_soon(guide.run)
        for _ in range(2):
            assert isinstance((await ask()).error, InvalidRequest)
        assert compiler.calls == 1
        clock.time += COSTLY_SECONDS
        again = await ask()
        assert isinstance(again.error, InvalidRequest) == (kind is GuideRefused)
        assert (compiler.calls, boxes[2].depth) == (calls, calls - 1)
        boxes[0].close()
    assert guide.snapshot().cached == 1
    assert guide.snapshot().evicted == 0


async def test_tenants_share_no_compiled_guide() -> None:
    compiler = FakeCompiler(GuideRefused("it does not do"))
    compiler.refusals.clear()
    boxes: list[Mailbox[Any, Any]] = [Mailbox(name, 16) for name in ("guide", "output", "scheduler")]
    guide = Guide(*boxes, compiler, prepared, GuideConfig(), HandClock(), warm=False)
    programs = []
    async with anyio.create_task_group() as group:
        group.start_soon(guide.run)
        for number, tenant in enumerate(("a", "a", "b", "a"), 1):
            asked = submission(number, [5], tenant=tenant)
            await boxes[0].put(GuideRequest(spec=SPEC, opened=opened(Slot()), submitted=asked))
            await anyio.wait_all_tasks_blocked()
            passed_on = boxes[2].take()
            assert isinstance(passed_on, SubmitRequest)
            programs.append(passed_on.sequences[0].sampling.guide)
        boxes[0].close()
    assert compiler.calls == 2
    assert [program.tenant for program in programs if program is not None] == ["a", "a", "b", "a"]


async def test_the_outcome_of_each_build_is_told_to_the_scheduler() -> None:
    outcomes: list[BuildOutcome] = ["built", "late", "gone"]

    async def prepare(program: GuideProgram) -> BuildOutcome:
        return outcomes[int(program.text)]

    boxes: list[Mailbox[Any, Any]] = [Mailbox(name, 8) for name in ("guide", "output", "scheduler")]
    guide = Guide(*boxes, FakeCompiler(GuideRefused("")), prepare, GuideConfig(), HandClock(), warm=False)
    async with anyio.create_task_group() as group:
        group.start_soon(guide.run)
        for number, outcome in enumerate(outcomes):
            ask = BuildGuide(GuideProgram(backend="llguidance", text=str(number)), "", engine_epoch=number)
            boxes[0].control(ask)
            await anyio.wait_all_tasks_blocked()
            assert boxes[2].take() == GuideBuilt(ask.program, number, outcome)
        boxes[0].close()


async def test_a_build_that_a_crash_cuts_off_is_told_as_lost() -> None:
    boxes: list[Mailbox[Any, Any]] = [Mailbox(name, 8) for name in ("guide", "output", "scheduler")]
    begun = anyio.Event()

    async def prepare(program: GuideProgram) -> BuildOutcome:
        begun.set()
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    guide = Guide(*boxes, FakeCompiler(GuideRefused("")), prepare, GuideConfig(), HandClock(), warm=False)
    ask = BuildGuide(GuideProgram(backend="llguidance", text="x"), "")
    async with anyio.create_task_group() as group:
        group.start_soon(guide.run)
        boxes[0].control(ask)
        await begun.wait()
        group.cancel_scope.cancel()
    assert boxes[2].take() == GuideBuilt(ask.program, 0, "lost")
