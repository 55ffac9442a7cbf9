"""The door: caps, order in line, and sensible advice to those who are refused."""

import anyio
import pytest

from troupellm.actors.admission import Admission, Place, estimate_tokens
from troupellm.protocol.config import SchedulerConfig
from troupellm.protocol.errors import EngineOverloaded, EngineStopped
from troupellm.protocol.intake import ChatPrompt, TextPrompt, TokensPrompt

pytestmark = pytest.mark.anyio


class FakeClock:
    time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


def door(seqs: int = 2, queued: int = 2, tokens: int | None = None) -> tuple[Admission, FakeClock]:
    clock = FakeClock()
    config = SchedulerConfig(max_num_seqs=seqs, max_num_queued_reqs=queued, max_num_queued_tokens=tokens)
    return Admission(config, clock), clock


def test_a_request_with_n_answers_counts_n_times() -> None:
    admission, _ = door()
    place = admission.enter(3, 1)
    admission.enter(1, 1)
    with pytest.raises(EngineOverloaded):
        admission.enter(1, 1)
    place.leave()
    place.leave()
    admission.enter(3, 1)


def test_a_request_larger_than_the_room_gets_in_alone() -> None:
    admission, _ = door()
    admission.enter(64, 1).leave()
    admission.enter(1, 1)
    with pytest.raises(EngineOverloaded):
        admission.enter(64, 1)


def test_waiting_tokens_are_capped_until_scheduled() -> None:
    admission, _ = door(seqs=8, tokens=100)
    place = admission.enter(1, 60)
    with pytest.raises(EngineOverloaded):
        admission.enter(1, 60)
    place.tokenized(40)
    other = admission.enter(1, 60)
    place.scheduled()
    other.scheduled()
    admission.enter(1, 5000)


def test_retry_after_follows_the_pace_of_leaving() -> None:
    admission, clock = door(seqs=4, queued=0)
    places = [admission.enter(1, 1) for _ in range(4)]
    with pytest.raises(EngineOverloaded) as caught:
        admission.enter(1, 1)
    assert caught.value.retry_after == 1.0
    for place in places[:3]:
        clock.time += 4.0
        place.leave()
        admission.enter(1, 1)
    with pytest.raises(EngineOverloaded) as caught:
        admission.enter(2, 1)
    assert caught.value.retry_after == pytest.approx(8.0)


async def test_those_who_wait_are_served_in_order() -> None:
    admission, _ = door(seqs=1, queued=0)
    first = admission.enter(1, 1)
    served: list[tuple[str, Place]] = []

    async def wait(name: str) -> None:
        served.append((name, await admission.wait(1, 1)))

    async with anyio.create_task_group() as group:
        for name in ("a", "b", "c"):
            group.start_soon(wait, name)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineOverloaded):
            admission.enter(1, 1)
        first.leave()
        for expected in ("a", "b", "c"):
            await anyio.wait_all_tasks_blocked()
            name, place = served.pop()
            assert name == expected
            place.leave()


async def test_leaving_the_line_frees_it_for_the_next() -> None:
    admission, _ = door(seqs=2, queued=0)
    first = admission.enter(1, 1)
    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()

        async def large() -> None:
            with scope:
                await admission.wait(2, 1)

        group.start_soon(large)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(admission.wait, 1, 1)
        await anyio.wait_all_tasks_blocked()
        assert admission.waiting == 2
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert admission.waiting == 0
    first.leave()


async def test_closing_turns_everybody_away() -> None:
    admission, _ = door(seqs=1, queued=0)
    admission.enter(1, 1)
    refused: list[str] = []

    async def wait() -> None:
        try:
            await admission.wait(1, 1)
        except EngineStopped:
            refused.append("waited")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        admission.close()
    assert refused == ["waited"]
    with pytest.raises(EngineStopped):
        admission.enter(1, 1)


def test_prompts_are_measured_without_a_tokenizer() -> None:
    assert estimate_tokens(TokensPrompt((1, 2, 3))) == 3
    assert estimate_tokens(TextPrompt("x" * 400)) == 101
    parts = [{"role": "user", "content": [{"type": "text", "text": "x" * 400}]}, {"role": "user", "content": "x" * 40}]
    assert estimate_tokens(ChatPrompt(messages=parts)) == 119
    assert estimate_tokens(ChatPrompt(messages=["junk"])) == 6  # type: ignore[list-item]
