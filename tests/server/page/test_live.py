"""Frames that all viewers of the page share."""

import anyio
import pytest

from troupellm.server.base.errors import HttpError
from troupellm.server.page.live import MOST_VIEWERS, LiveFrames

pytestmark = pytest.mark.anyio


class Source:
    def __init__(self) -> None:
        self.asked = 0

    async def read(self) -> bytes:
        self.asked += 1
        return b'{"n": %d}' % self.asked


async def test_viewers_share_each_frame():
    source = Source()
    frames = LiveFrames(source.read, interval=0.0)
    seen: list[list[bytes]] = []

    async def view() -> None:
        mine: list[bytes] = []
        seen.append(mine)
        number = -1
        with frames.watching():
            for _ in range(5):
                number, frame = await frames.next(number)
                mine.append(frame)

    async with anyio.create_task_group() as group:
        for _ in range(32):
            group.start_soon(view)
    assert frames.viewers == 0
    assert source.asked == frames.number <= 32 + 5
    assert all(frame.startswith(b"data: {") and frame.endswith(b"\n\n") for mine in seen for frame in mine)
    assert all(len(set(mine)) == 5 for mine in seen)


async def test_nothing_is_read_without_a_viewer():
    source = Source()
    frames = LiveFrames(source.read, interval=0.0)
    await anyio.wait_all_tasks_blocked()
    assert source.asked == 0
    number, _ = await frames.next(-1)
    await anyio.wait_all_tasks_blocked()
    assert (source.asked, number) == (1, 1)


async def test_a_viewer_that_leaves_hands_the_frame_to_another_one():
    source, entered, gate = Source(), anyio.Event(), anyio.Event()

    async def slow() -> bytes:
        entered.set()
        await gate.wait()
        return await source.read()

    frames = LiveFrames(slow, interval=0.0)
    got: list[bytes] = []

    async def leaves() -> None:
        with scope:
            await frames.next(-1)

    async def stays() -> None:
        got.append((await frames.next(-1))[1])

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as group:
        group.start_soon(leaves)
        await entered.wait()
        group.start_soon(stays)
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert got == [b'data: {"n": 1}\n\n']


async def test_a_slow_viewer_skips_frames():
    source = Source()
    frames = LiveFrames(source.read, interval=0.0)
    number, _ = await frames.next(-1)
    for seen in range(1, 4):
        await frames.next(seen)
    newest, frame = await frames.next(number)
    assert (newest, frame) == (4, b'data: {"n": 4}\n\n')


async def test_one_viewer_too_many_is_refused():
    frames = LiveFrames(Source().read)
    frames.viewers = MOST_VIEWERS
    with pytest.raises(HttpError) as refused, frames.watching():
        pass
    assert (refused.value.status, refused.value.code) == (503, "too_many_viewers")
    assert frames.viewers == MOST_VIEWERS


async def test_the_first_viewer_sees_no_frame_of_an_earlier_one():
    source = Source()
    frames = LiveFrames(source.read, interval=0.0)
    for wanted in (1, 2):
        with frames.watching():
            assert await frames.next(-1) == (wanted, b'data: {"n": %d}\n\n' % wanted)
