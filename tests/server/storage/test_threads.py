import anyio
import msgspec
import pytest

from troupellm.protocol.api.anthropic import InputMessage
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body_room import BodyRoom
from troupellm.server.base.errors import HttpError
from troupellm.server.storage.message_threads import SECONDS, Conversation, Limits, Threads, counted_from, read_held


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_thread_is_there_for_its_owner_until_its_time_is_over():
    clock = Clock()
    threads = Threads(now=clock)
    threads.put("a", "m1", b"{}", None)
    assert threads.get("a", "m1") == b"{}"
    assert threads.get("b", "m1") is None
    clock.seconds = SECONDS
    assert threads.get("a", "m1") is None
    assert (len(threads), threads.size, threads.num_missed) == (0, 0, 2)


def test_a_response_that_was_continued_makes_room_for_its_successor():
    threads = Threads()
    threads.put("a", "m1", b"one", None)
    threads.put("b", "m1", b"other", None)
    threads.put("a", "m2", b"longer", "m1")
    assert threads.get("a", "m1") is None
    assert (threads.get("a", "m2"), threads.get("b", "m1"), threads.size) == (b"longer", b"other", 11)


def test_the_owner_of_most_bytes_loses_the_thread_that_was_not_used_for_longest():
    threads = Threads(size=100)
    threads.put("small", "s", b"x" * 10, None)
    for name in ("m1", "m2", "m3"):
        threads.put("large", name, b"x" * 30, None)
    threads.get("large", "m1")
    threads.put("small", "t", b"x" * 10, None)
    assert threads.get("large", "m2") is None
    assert all(threads.get(*key) for key in (("large", "m1"), ("large", "m3"), ("small", "s"), ("small", "t")))
    assert threads.num_evicted == 1


def test_the_time_of_a_thread_begins_again_with_each_use():
    clock = Clock()
    threads = Threads(now=clock)
    threads.put("a", "short", b"{}", None)
    threads.put("a", "long", b"{}", None, 3 * SECONDS)
    for _ in range(3):
        clock.seconds += SECONDS - 1
        assert threads.get("a", "short") == b"{}"
    clock.seconds += SECONDS
    assert [threads.get("a", name) for name in ("short", "long")] == [None, None]
    threads.put("a", "long", b"{}", None, 3 * SECONDS)
    clock.seconds += 2 * SECONDS
    assert threads.get("a", "long") == b"{}"


def test_the_owner_of_most_threads_makes_room_where_they_are_too_many():
    threads = Threads(threads=3)
    threads.put("heavy", "h", b"x" * 100, None)
    for name in ("m1", "m2", "m3"):
        threads.put("many", name, b"x", None)
    assert threads.get("heavy", "h") is not None
    assert [threads.get("many", name) for name in ("m1", "m2", "m3")] == [None, b"x", b"x"]
    threads.drop("heavy", "h")
    threads.drop("heavy", "h")
    assert (len(threads), threads.size) == (2, 2)


@pytest.mark.anyio
async def test_a_conversation_that_is_held_counts_as_a_part_of_the_body(make_wire, make_exchange):
    room = BodyRoom(16 * 2**20, 2**20)
    exchange = make_exchange(make_wire(), headers={"content-length": "40"})
    body = b'["' + b"x" * 96 + b'"]'
    with room.reserving("", 40) as exchange.room:
        assert await read_held(exchange, body, list[str], Limits(140, 1.0, anyio.CapacityLimiter(1))) == ["x" * 96]
        assert (exchange.body_bytes, room.num_bytes) == (140, 100)
    exchange.body_bytes = None
    with pytest.raises(HttpError) as caught:
        await read_held(exchange, body, list[str], Limits(139, 1.0, anyio.CapacityLimiter(1)))
    assert caught.value.status == 413
    assert "send a shorter conversation" in str(caught.value)


def test_threads_are_bounded_by_number_and_by_size():
    threads = Threads(threads=2, size=10)
    for number in range(5):
        threads.put("a", str(number), b"x", None)
    threads.put("a", "huge", b"x" * 11, None)
    assert (len(threads), threads.num_evicted) == (2, 3)
    text = threads.metrics().decode()
    assert "troupellm_message_threads 2.0" in text
    assert "troupellm_message_threads_evicted_total 3.0" in text


@pytest.mark.parametrize(
    ("param", "shown"),
    [
        ("messages[7].content[1].type", "messages[2].content[1].type"),
        ("messages[4]", "messages[4]"),
        ("max_tokens", "max_tokens"),
        (None, None),
    ],
)
def test_errors_count_the_messages_of_the_request(param, shown):
    with pytest.raises(InvalidRequest) as caught, counted_from(5):
        raise InvalidRequest(f"{param} is wrong", param=param)
    assert (caught.value.param, caught.value.message) == (shown, f"{shown} is wrong")


def test_a_conversation_is_read_back_as_it_was_held():
    whole = Conversation([InputMessage(role="user", content="Hi")], system="S", tools=[{"name": "f"}])
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Conversation) == whole
