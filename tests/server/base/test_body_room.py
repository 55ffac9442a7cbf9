"""Room for request bodies: bounded for all keys and for each, and given back however a request ends."""

from contextlib import ExitStack
from typing import Any

import anyio
import pytest

from troupellm.protocol.api.chat import CompletionRequest
from troupellm.protocol.errors import RateLimited
from troupellm.server.base.body import read_body
from troupellm.server.base.body_room import SMALL_BYTES, TRIMMED_BYTES, BodyRoom
from troupellm.server.base.errors import HttpError
from troupellm.server.base.exchange import PROMPT_TOKEN_BYTES
from troupellm.server.base.json_body import CONTAINER_BYTES, VALUE_BYTES, decode_body

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


async def test_bodies_of_which_nothing_has_come_take_no_room(make_wire, make_exchange):
    room = BodyRoom(64 * MEBIBYTE, largest=8 * MEBIBYTE)
    headers = {"content-type": "application/json", "content-length": str(8 * MEBIBYTE)}

    async def read(wire: Any) -> bytes:
        exchange = make_exchange(wire, headers=headers)
        with room.reserving("", 8 * MEBIBYTE) as body:
            return await read_body(exchange, limit=8 * MEBIBYTE, timeout=60, reservation=body)

    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(read, make_wire([], stops=True))
        await anyio.wait_all_tasks_blocked()
        assert len(await read(make_wire([b"x" * MEBIBYTE] * 8))) == 8 * MEBIBYTE
        group.cancel_scope.cancel()
    assert (room.num_bytes, room.num_waiting) == (0, 0)


@pytest.mark.parametrize("key", ["", "a"])
async def test_bodies_that_are_half_read_come_to_their_ends_one_after_another(key):
    room = BodyRoom(32 * MEBIBYTE, largest=8 * MEBIBYTE)
    ended = []

    async def work(number: int) -> None:
        with room.reserving(key, 8 * MEBIBYTE) as body:
            for size in range(1, 9):
                await body.grow(size * MEBIBYTE, 0)
                await anyio.lowlevel.checkpoint()
            ended.append(number)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(work, number)
    assert sorted(ended) == list(range(6))
    assert (room.num_bytes, room.num_waiting) == (0, 0)


async def test_a_key_at_its_share_holds_up_no_other_key():
    room = BodyRoom(16 * MEBIBYTE, largest=MEBIBYTE)
    with ExitStack() as stack:
        loud = [stack.enter_context(room.reserving("loud", MEBIBYTE)) for _ in range(6)]
        for body in loud:
            await body.enter(0)
        others = [stack.enter_context(room.reserving("other", MEBIBYTE)) for _ in range(2)]
        for body in others:  # one has the shared bytes that are left, and one the slot
            await body.enter(0)
        async with anyio.create_task_group() as group:
            for key in ("loud", "polite"):
                group.start_soon(stack.enter_context(room.reserving(key, MEBIBYTE)).enter, 0)
                await anyio.wait_all_tasks_blocked()
            others[0].leave()
            await anyio.wait_all_tasks_blocked()
            assert room.num_waiting == 1  # the loud key's
            loud[0].leave()


async def test_room_that_was_not_used_is_no_reason_to_trim():
    room = BodyRoom(4 * TRIMMED_BYTES, largest=TRIMMED_BYTES)
    with room.reserving("", TRIMMED_BYTES) as body:
        await body.enter(0)
        body.shrink(300)
    assert not room.take_trim()


async def test_bytes_that_are_added_to_a_small_body_are_large_ones():
    room = BodyRoom(16 * MEBIBYTE, largest=MEBIBYTE)
    with room.reserving("", 100) as body:
        await body.enter(0)
        await body.add(MEBIBYTE, 0)
        assert room.num_bytes == MEBIBYTE + 100
        body.release(MEBIBYTE + 50)
        assert room.num_bytes == 50
    assert room.num_bytes == 0


async def test_a_body_that_takes_room_now_never_waits_and_never_overtakes():
    room = BodyRoom(4 * MEBIBYTE, largest=MEBIBYTE)
    with room.reserving("", MEBIBYTE) as one, room.reserving("", MEBIBYTE) as two, room.reserving("", 9) as small:
        assert one.take_now(MEBIBYTE)
        assert not two.take_now(MEBIBYTE)
        assert small.take_now(9)
        assert room.num_bytes == MEBIBYTE + 9


async def test_a_body_whose_prompt_is_made_keeps_what_the_prompt_does_not_explain(make_wire, make_exchange):
    room = BodyRoom(16 * MEBIBYTE, largest=MEBIBYTE)
    exchange = make_exchange(make_wire())
    with room.reserving("", MEBIBYTE) as body:
        exchange.room = body
        await body.enter(0)
        exchange.prompt_made(1_000)
        assert room.num_bytes == MEBIBYTE - 1_000 * PROMPT_TOKEN_BYTES
        exchange.prompt_made(MEBIBYTE)
        assert room.num_bytes == 0


async def test_a_body_takes_room_for_the_values_of_a_list():
    room = BodyRoom(64 * MEBIBYTE, largest=8 * MEBIBYTE)
    text = b'{"prompt":[' + b",".join(b"%d" % number for number in range(100_000)) + b"]}"
    with room.reserving("", len(text)) as body:
        await body.enter(0)
        request = await decode_body(text, CompletionRequest, reservation=body)
        assert len(request.prompt) == 100_000
        assert room.num_bytes >= len(text) + 99_999 * VALUE_BYTES


async def test_a_body_of_text_takes_its_bytes_alone():
    room = BodyRoom(64 * MEBIBYTE, largest=8 * MEBIBYTE)
    text = b'{"prompt":"' + b"a,[{" * 50_000 + b'"}'
    with room.reserving("", len(text)) as body:
        await body.enter(0)
        await decode_body(text, CompletionRequest, reservation=body)
        assert room.num_bytes < len(text) + 10 * CONTAINER_BYTES


async def test_lists_that_are_larger_than_the_room_are_decoded_one_after_another():
    room = BodyRoom(16 * MEBIBYTE, largest=MEBIBYTE)
    text = b'{"prompt":[' + b",".join([b"7"] * 500_000) + b"]}"
    most = 0

    async def work(key: str) -> None:
        nonlocal most
        with room.reserving(key, len(text)) as body:
            await body.enter(0)
            await decode_body(text, CompletionRequest, reservation=body)
            most = max(most, room.num_bytes)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for key in ("a", "a", "b", ""):
                group.start_soon(work, key)
    assert 500_000 * VALUE_BYTES < most < 2 * 500_000 * VALUE_BYTES
    assert (room.num_bytes, room.num_waiting) == (0, 0)
