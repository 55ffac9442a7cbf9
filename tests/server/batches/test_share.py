"""Limits of an owner's batches together: a bound of lines, a pause at a limit, and a turn beside other owners."""

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.snapshot import EngineSnapshot, SchedulerSnapshot
from troupellm.server.batches.concurrency import Governor, Share

pytestmark = pytest.mark.anyio


class FakeEngine:
    """Idle, of four rows."""

    config = EngineConfig.from_flat({"max_num_seqs": 4})
    state = "ready"

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            state="ready",
            uptime_seconds=0.0,
            model="",
            max_model_len=0,
            open_requests=0,
            scheduler=SchedulerSnapshot(),
            actors=(),
        )


class OpenGovernor:
    """Lets everybody in."""

    most = 4

    def __init__(self) -> None:
        self.inside = 0

    async def enter(self) -> None:
        await checkpoint()
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1


def share_of(governor: Any) -> Share:
    return Share(governor.most, governor)


async def settled() -> None:
    for _ in range(50):
        await checkpoint()


@pytest.mark.parametrize(("most", "out"), [(None, 3), (2, 2), (9, 3)])
async def test_no_more_lines_are_out_than_the_engine_or_the_key_lets_in(most: int | None, out: int) -> None:
    engine: Any = FakeEngine()
    share = Governor(engine, 4).share(most)
    claimed: list[int] = []

    async def claim(number: int) -> None:
        await share.claim()
        claimed.append(number)

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(claim, number)
        await settled()
        assert len(claimed) == out
        share.release()
        await settled()
        assert len(claimed) == out + 1
        group.cancel_scope.cancel()


async def test_at_a_limit_all_lines_wait_until_one_has_ended() -> None:
    governor = OpenGovernor()
    share = share_of(governor)
    await share.enter()
    share.pause(3600.0)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(share.enter)
        await settled()
        assert governor.inside == 1
        share.ended()  # one is tried; the others wait to see how it goes
        await settled()
        assert governor.inside == 2
        share.pause(3600.0)
        await settled()
        assert governor.inside == 2
        share.ended()
        await settled()
        assert governor.inside == 3
        group.cancel_scope.cancel()


async def test_a_pause_ends_by_itself() -> None:
    governor = OpenGovernor()
    share = share_of(governor)
    share.pause(0.02)
    with anyio.fail_after(10):
        await share.enter()
    assert governor.inside == 1


async def test_an_owners_only_line_waits_for_one_of_a_crowd() -> None:
    """One with many lines in line comes before another one's only line once, not many times."""

    engine: Any = FakeEngine()
    governor = Governor(engine, 1)
    await governor.enter()
    crowd, single = share_of(governor), share_of(governor)
    entered: list[str] = []

    async def enter(share: Share, name: str) -> None:
        await share.enter()
        entered.append(name)

    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(enter, crowd, "crowd")
        await settled()
        group.start_soon(enter, single, "single")
        await settled()
        for _ in range(2):
            governor.leave()
            await settled()
        assert entered == ["crowd", "single"]
        group.cancel_scope.cancel()
