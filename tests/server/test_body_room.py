"""Room for request bodies: bounded for all keys and for each, and given back however a request ends."""

import anyio
import pytest

from troupellm.protocol.errors import RateLimited
from troupellm.server.body_room import SMALL_BYTES, TRIMMED_BYTES, BodyRoom
from troupellm.server.errors import HttpError

pytestmark = pytest.mark.anyio

MEBIBYTE = 2**20


def test_room_is_given_back_and_there_is_always_room_for_one_body():
    room = BodyRoom(1, largest=8 * MEBIBYTE)
    with room.reserving("a", 8 * MEBIBYTE) as whole:
        assert room.num_bytes == 0
        anyio.run(whole.enter, 1.0)
        assert room.num_bytes == 8 * MEBIBYTE
        whole.shrink(MEBIBYTE)
        assert room.num_bytes == MEBIBYTE
    assert room.num_bytes == 0


async def test_a_body_waits_until_another_one_has_gone():
    room = BodyRoom(16 * MEBIBYTE, largest=8 * MEBIBYTE)
    entered = []

    async def work(key: str) -> None:
        with room.reserving(key, 8 * MEBIBYTE) as body:
            await body.enter(0)
            entered.append(key)

    with room.reserving("a", 8 * MEBIBYTE) as first:
        await first.enter(0)
        async with anyio.create_task_group() as group:
            group.start_soon(work, "b")
            await anyio.wait_all_tasks_blocked()
            assert (entered, room.num_waiting) == ([], 1)
            first.leave()
    assert (entered, room.num_bytes, room.num_waiting) == (["b"], 0, 0)


async def test_a_key_leaves_room_for_others_and_is_told_so():
    room = BodyRoom(16 * MEBIBYTE, largest=MEBIBYTE)
    bodies = [room.reserving("loud", MEBIBYTE) for _ in range(6)]
    for body in bodies:
        await body.__enter__().enter(0)
    with room.reserving("loud", MEBIBYTE) as more, pytest.raises(RateLimited):
        await more.enter(0.001)
    with room.reserving("polite", MEBIBYTE) as other:
        await other.enter(0.001)
        assert room.num_bytes == 7 * MEBIBYTE
    for body in bodies:
        body.__exit__(None, None, None)
    assert room.num_bytes == 0


async def test_where_all_room_is_taken_the_answer_is_503():
    room = BodyRoom(2 * MEBIBYTE, largest=MEBIBYTE)
    with room.reserving("a", MEBIBYTE) as first, room.reserving("b", MEBIBYTE) as second:
        await first.enter(0)
        with pytest.raises(HttpError) as caught:
            await second.enter(0.001)
    assert (caught.value.status, caught.value.code) == (503, "server_is_overloaded")
    assert room.num_waiting == 0


async def test_small_bodies_wait_for_no_large_one():
    room = BodyRoom(2 * MEBIBYTE, largest=MEBIBYTE)
    with room.reserving("", MEBIBYTE) as large, room.reserving("", SMALL_BYTES) as small:
        await large.enter(0)
        await small.enter(0.001)
        assert room.num_bytes == MEBIBYTE + SMALL_BYTES


async def test_the_heap_is_trimmed_once_many_large_bodies_have_gone():
    room = BodyRoom(4 * TRIMMED_BYTES, largest=TRIMMED_BYTES)
    with room.reserving("", TRIMMED_BYTES) as body:
        await body.enter(0)
        assert not room.take_trim()
    assert [room.take_trim(), room.take_trim()] == [True, False]
