"""Preparing images in processes that only exist in the test."""

from typing import Any

import anyio
import pytest

from troupellm.actors.media import preparer as media_preparer
from troupellm.actors.media.preparer import ImageFault, ProcessPreparer
from troupellm.protocol.config.media import MediaConfig
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.wire.frames import Assembler, Codec
from troupellm.protocol.wire.media import HELLO, ImagePrepared, LoadProcessor, PrepareImage, ProcessorLoaded, ToMedia

pytestmark = pytest.mark.anyio
PREPARED = ImagePrepared(digest=b"d", num_vectors=1, grid=(1, 1), tensors=())


class FakeChild:
    """Answers when it is told to."""

    pid = 1
    cpu_seconds: float | None = 0.0
    exit_code = 1

    def __init__(self, events: Any) -> None:
        self.events, self.killed, self.asked = events, False, 0
        self._codec: Codec[Any] = Codec()
        self._assembler: Assembler[ToMedia] = Assembler(ToMedia, HELLO)
        self.say(HELLO)

    def send(self, data: bytes) -> None:
        for message in self._assembler.feed(data):
            if isinstance(message, LoadProcessor):
                self.say(ProcessorLoaded())
            elif isinstance(message, PrepareImage):
                self.asked += 1

    def say(self, message: Any) -> None:
        self.events.received(self._codec.encode(message))

    def kill(self) -> None:
        self.killed = True

    async def ended(self, timeout: float) -> int | None:
        return self.exit_code


class FakeProcesses:
    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.used: float | None = 0.0

    async def start(self, module: str, events: Any) -> FakeChild:
        self.children.append(FakeChild(events))
        self.children[-1].cpu_seconds = self.used
        return self.children[-1]


@pytest.fixture
def processes() -> FakeProcesses:
    return FakeProcesses()


@pytest.fixture
def preparer(processes: FakeProcesses) -> ProcessPreparer:
    return ProcessPreparer("folder", MediaConfig(), processes)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_client_that_leaves_costs_a_process_only_if_the_image_takes_long(
    answers, preparer, processes, monkeypatch
):
    monkeypatch.setattr(media_preparer, "SPARE_SECONDS", 0.2)
    async with anyio.create_task_group() as group:
        group.start_soon(preparer.prepare, b"one")
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
        if answers:
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
                processes.children[0].say(PREPARED)
    assert processes.children[0].killed is not answers

    async def answer() -> None:
        await anyio.wait_all_tasks_blocked()
        processes.children[-1].say(ImagePrepared(digest=b"two", num_vectors=2, grid=(1, 1), tensors=()))

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        assert (await preparer.prepare(b"two")).digest == b"two"
    assert len(processes.children) == (1 if answers else 2)


async def test_an_image_that_ends_its_process_is_at_fault_and_the_next_one_has_another(preparer, processes):
    async def die() -> None:
        await anyio.wait_all_tasks_blocked()
        processes.children[0].events.closed()

    async with anyio.create_task_group() as group:
        group.start_soon(die)
        with pytest.raises(ImageFault, match="breaks the decoder"):
            await preparer.prepare(b"one")
    await preparer.warm_up()
    assert len(processes.children) == 2
    assert await preparer.close()
    assert all(child.killed for child in processes.children)


async def test_a_process_that_is_killed_from_outside_is_not_the_images_fault(preparer, processes):
    async def killed() -> None:
        await anyio.wait_all_tasks_blocked()
        processes.children[0].exit_code = -9
        processes.children[0].events.closed()

    async with anyio.create_task_group() as group:
        group.start_soon(killed)
        with pytest.raises(EngineStopped) as caught:
            await preparer.prepare(b"one")
    assert (caught.value.code, caught.value.retryable) == ("engine_restarting", True)


@pytest.mark.parametrize("used", [0.0, None])
async def test_a_machine_that_is_too_busy_is_not_the_images_fault(used, processes, monkeypatch):
    monkeypatch.setattr(media_preparer, "PATIENCE", 5)
    processes.used = used
    preparer = ProcessPreparer("folder", MediaConfig(media_timeout=0.02), processes)
    with pytest.raises(ImageFault if used is None else EngineStopped):
        await preparer.prepare(b"one")
    assert (preparer.num_killed, processes.children[0].killed) == (1, True)
