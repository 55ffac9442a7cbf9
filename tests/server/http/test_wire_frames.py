"""The cost limits of HTTP/2's frames, and frames that wait for a reader."""

import anyio
import h2.exceptions
import pytest
from hyperframe.frame import DataFrame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from troupellm.server.http.http2_flood import BURST, PER_SECOND, WORTH_SENDING, Frames, Unsent

OPEN, OVER = 1, 3
PREAMBLE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
USELESS = {
    "resets": RstStreamFrame(OPEN),
    "pings": PingFrame(0, b"12345678"),
    "pings that answer none": PingFrame(0, b"12345678", flags=["ACK"]),
    "settings": SettingsFrame(0),
    "settings that answer none": SettingsFrame(0, flags=["ACK"]),
    "windows": WindowUpdateFrame(0, 1),
    "windows of a stream": WindowUpdateFrame(OPEN, 1),
    "empty data": DataFrame(OPEN),
    "data of padding": DataFrame(OPEN, pad_length=200, flags=["PADDED"]),
    "ends of what is over": DataFrame(OVER, flags=["END_STREAM"]),
    "little data for what is over": DataFrame(OVER, b"x" * (WORTH_SENDING - 1)),
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def frames(clock):
    frames = Frames(clock, lambda number: number == OPEN)
    frames.max_frame_size = 16_384
    frames.add_data(PREAMBLE)
    return frames


def take(frames: Frames, frame, times: int = 1) -> None:
    frames.add_data(frame.serialize() * times)
    assert len(list(frames)) == times


@pytest.mark.parametrize("name", USELESS)
def test_useless_frames_beyond_the_allowance_end_the_connection(frames, clock, name):
    take(frames, USELESS[name], BURST)
    with pytest.raises(h2.exceptions.DenialOfServiceError):
        take(frames, USELESS[name])
    clock.now += 1.0
    take(frames, USELESS[name], PER_SECOND - 1)
    with pytest.raises(h2.exceptions.DenialOfServiceError):
        take(frames, USELESS[name], 2)


def test_bodies_and_requests_are_no_noise(frames):
    take(frames, HeadersFrame(OPEN, b"", flags=["END_HEADERS"]), 2 * BURST)
    take(frames, DataFrame(OPEN, b"x" * 32), 2 * BURST)
    take(frames, DataFrame(OPEN, flags=["END_STREAM"]), 2 * BURST)
    take(frames, DataFrame(OVER, b"x" * WORTH_SENDING), 2 * BURST)  # on its way when the answer came


def test_a_reader_may_widen_both_windows_for_all_that_it_was_sent(frames):
    for _ in range(BURST):
        frames.sent(70, all_there_was=True)
        frames.sent(16_384, all_there_was=False)
    take(frames, WindowUpdateFrame(0, 70), 4 * BURST)
    take(frames, PingFrame(0, b"12345678"), BURST)
    with pytest.raises(h2.exceptions.DenialOfServiceError):
        take(frames, WindowUpdateFrame(0, 70))


def test_window_updates_of_single_bytes_earn_no_credit(frames):
    for _ in range(BURST):
        frames.sent(1, all_there_was=False)
    with pytest.raises(h2.exceptions.DenialOfServiceError):
        take(frames, WindowUpdateFrame(0, 1), BURST + 1)


@pytest.mark.anyio
async def test_a_reader_without_a_window_holds_up_the_writer(frames):
    from hypercorn.asyncio.worker_context import EventWrapper

    unsent = Unsent(EventWrapper, frames)
    await unsent.push(b"x" * 32_767)
    written = anyio.Event()

    async def write() -> None:
        await unsent.push(b"y" * 32_767)
        written.set()

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        await anyio.wait_all_tasks_blocked()
        for _ in range(3):
            assert await unsent.pop(0) == b""
            await anyio.wait_all_tasks_blocked()
            assert not written.is_set()
        while len(unsent.buffer) > 16_384:
            assert len(await unsent.pop(16_384)) > 0
        await written.wait()
