"""Lines on their way: patience, attempts, and which lines make room for others."""

import io
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.protocol.api.caller import Caller
from troupellm.protocol.messages.snapshot import EngineSnapshot, SchedulerSnapshot
from troupellm.server.batches.concurrency import Governor, has_room
from troupellm.server.batches.lines import MOST_ATTEMPTS, Bad, Good, Lines, ask, count_lines
from troupellm.server.host.internal_requests import Answered

pytestmark = pytest.mark.anyio

LINE = Good(7, "c7", "/v1/completions", b"{}")


class FakeInside:
    """Gives its answers one after the other, and the last one again and again."""

    def __init__(self, *answers: Answered) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def post(self, url: str, raw: bytes, *, caller: Caller) -> Answered:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class FakeShare:
    def __init__(self) -> None:
        self.inside = 0
        self.entered = 0
        self.released = 0

    async def enter(self) -> None:
        self.inside += 1
        self.entered += 1

    def leave(self) -> None:
        self.inside -= 1

    def pause(self, seconds: float) -> None:
        assert self.inside == 0

    def ended(self) -> None:
        pass

    def release(self) -> None:
        self.released += 1


def answered(status: int, *, again: bool = False) -> Answered:
    return Answered(status, b"{}", "id", 0.0 if again else None)


async def asked(inside: FakeInside) -> tuple[list[Any], FakeShare]:
    kept: list[Any] = []
    share = FakeShare()

    async def keep(number: int, result: Any) -> None:
        assert share.inside == 1
        kept.append((number, result.response.status_code))

    await ask(inside, LINE, share, keep)  # type: ignore[arg-type]
    assert (share.inside, share.released) == (0, 1)
    return kept, share


async def test_a_line_comes_again_as_often_as_it_is_told_to_come_later() -> None:
    inside = FakeInside(*[answered(429, again=True)] * 20, answered(200))
    kept, share = await asked(inside)
    assert (kept, inside.asked, share.entered) == ([(7, 200)], 21, 21)


@pytest.mark.parametrize(("status", "again", "times"), [(400, False, 1), (500, False, 1), (503, True, MOST_ATTEMPTS)])
async def test_a_line_that_fails_is_given_up(status: int, again: bool, times: int) -> None:
    inside = FakeInside(answered(status, again=again))
    kept, _ = await asked(inside)
    assert (kept, inside.asked) == ([(7, status)], times)


class FakeEngine:
    """Of four rows."""

    def __init__(self) -> None:
        from troupellm.protocol.config.engine import EngineConfig

        self.config = EngineConfig.from_flat({"max_num_seqs": 4})
        self.state = "ready"
        self.told: dict[str, Any] = {}
        self.scheduler = SchedulerSnapshot()

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            state=self.state,
            uptime_seconds=0.0,
            model="",
            max_model_len=0,
            open_requests=0,
            scheduler=self.scheduler,
            actors=(),
            **self.told,
        )


def test_room_is_what_others_leave() -> None:
    def room(inside: int = 0, told: dict[str, Any] | None = None, **scheduler: int) -> bool:
        engine = FakeEngine()
        engine.scheduler, engine.told = SchedulerSnapshot(**scheduler), told or {}
        return has_room(engine.snapshot(), 4, inside)

    assert room()
    assert room(inside=2)
    assert not room(inside=3)  # one row of four stays free
    assert not room(running=3)
    assert not room(waiting=1)
    for told in ({"paused": True}, {"sleep_level": 0}, {"unready": "the worker restarts"}):
        assert not room(told=told)


async def test_lines_wait_in_line_for_room() -> None:
    engine: Any = FakeEngine()
    governor = Governor(engine)
    assert governor.most == 2
    entered: list[int] = []

    async def enter(number: int) -> None:
        await governor.enter()
        entered.append(number)

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(enter, number)
            await checkpoint()
        for expected in ([0, 1], [0, 1, 2], [0, 1, 2, 3]):
            await anyio.wait_all_tasks_blocked()
            assert entered == expected
            governor.leave()
        governor.leave()
    assert governor.inside == 0


def read_from(text: bytes, longest: int, endpoint: str | None = None) -> Lines:
    return Lines(io.BytesIO(text), {"/a", "/b"}, endpoint=endpoint, longest=longest)


def test_lines_are_counted_and_read_alike() -> None:
    for text in (b"", b"\n\n", b"a", b"a\n", b"a\nb", b" \n\ta\r\n\r\n b", b"x" * 20_000 + b"\n\n" + b"y" * 9000):
        lines = read_from(text, 100_000)
        assert count_lines(io.BytesIO(text), 10) == len(lines.read())
        assert lines.read() == []
    assert count_lines(io.BytesIO(b"a\n" * 50), 10) == 11  # it does not go on for ever
    assert [line.number for line in read_from(b"\na\n\nb", 10).read()] == [2, 4]


def test_a_line_is_checked_against_its_batch() -> None:
    def check(text: bytes, endpoint: str | None = "/a") -> Good | Bad:
        return read_from(text, 1000, endpoint).read()[0]

    good = check(b'{"custom_id": "x", "url": "/a", "body": {"n": 1.50}, "more": 1}')
    assert good == Good(1, "x", "/a", b'{"n": 1.50}')
    assert isinstance(check(b'{"custom_id": "x", "url": "/b", "body": {}}'), Bad)
    assert isinstance(check(b'{"custom_id": "x", "url": "/b", "body": {}}', endpoint=None), Good)
    far = check(b'{"custom_id": "x", "url": "/c", "body": {}}', endpoint=None)
    assert isinstance(far, Bad)
    assert far.result.custom_id == "x"
    long = check(b'{"custom_id": "' + b"x" * 2000)
    assert isinstance(long, Bad)
    assert long.result.error is not None
    assert long.result.error.code == "line_too_long"
