"""Frames: all bytes, in all pieces, are a message of the union or a FrameError, and cost as much as came."""

import pickle
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from troupellm.protocol.wire.frame_socket import Bell, FrameSocket, FrameTimeout
from troupellm.protocol.wire.frames import Assembler, Codec, FrameError, Hello, PeerGone

HELLO = Hello(link="test", version="1")


class Word(msgspec.Struct, frozen=True, tag=True):
    text: str


class Number(msgspec.Struct, frozen=True, tag=True):
    value: int
    data: bytes = b""


Message = Word | Number
messages = st.one_of(
    st.builds(Word, text=st.text()), st.builds(Number, value=st.integers(-(2**63), 2**63 - 1), data=st.binary())
)


def assembler(*, limit: int = 1 << 16, greeted: bool = True) -> Assembler[Message]:
    made: Assembler[Message] = Assembler(Message, HELLO, limit=limit)
    if greeted:
        made.feed(frame(HELLO))
    return made


def frame(message: Any) -> bytes:
    return Codec[Any]().encode(message)


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


@given(st.lists(messages, max_size=8), st.lists(st.integers(1, 40), max_size=30))
def test_messages_come_back_however_they_are_cut(sent: list[Message], cuts: list[int]) -> None:
    stream = b"".join(frame(message) for message in (HELLO, *sent))
    receiver, received = assembler(greeted=False), []
    for size in cuts:
        received += receiver.feed(stream[:size])
        stream = stream[size:]
    received += receiver.feed(stream)
    assert received == sent
    assert "inside a frame" not in str(receiver.end())


@given(st.binary(max_size=300))
def test_garbage_gives_messages_or_a_frame_error_and_nothing_else(data: bytes) -> None:
    for receiver in (assembler(), assembler(greeted=False)):
        with suppress(FrameError):
            assert all(isinstance(message, Message) for message in receiver.feed(data))


@given(st.binary(max_size=200))
def test_a_well_framed_payload_is_a_message_or_refused(payload: bytes) -> None:
    try:
        (message,) = assembler().feed(framed(payload))
    except FrameError:
        return
    assert isinstance(message, Message)


@given(messages, st.integers(0, 400), st.integers(0, 255))
def test_a_flipped_byte_is_a_message_or_refused_or_waited_for(message: Message, place: int, value: int) -> None:
    data = bytearray(frame(message))
    data[place % len(data)] = value
    with suppress(FrameError):
        assert all(isinstance(each, Message) for each in assembler().feed(data))


@pytest.mark.parametrize("length", [0, (1 << 16) + 1, 2**31, 2**32 - 1])
def test_a_length_out_of_range_is_refused_before_anything_follows(length: int) -> None:
    with pytest.raises(FrameError, match=f"{length} bytes was announced"):
        assembler().feed(length.to_bytes(4, "little"))


def test_nothing_is_allocated_from_a_declared_length() -> None:
    receiver = assembler(limit=1 << 30)
    tracemalloc.start()
    try:
        assert receiver.feed(((1 << 30) - 1).to_bytes(4, "little") + b"x") == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_before_the_greeting_only_a_short_frame_is_taken() -> None:
    with pytest.raises(FrameError, match="1 to 256"):
        assembler(greeted=False).feed((257).to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (frame(Hello(link="test", version="2")), "has version '2', this end '1'"),
        (frame(Hello(link="other", version="1")), "is no test"),
        (frame(Word("hello")), "does not speak"),
        (framed(b"GET / HTTP/1.1"), "does not speak"),
        (framed(pickle.dumps({"link": "test"})), "does not speak"),
    ],
)
def test_a_foreign_peer_is_refused(first: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        assembler(greeted=False).feed(first)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps(Word("x")),
        pickle.dumps(Harmful()),
        b"",
        b"\xc1",
        b"\x91" * 10_000 + b"\xc0",
        b"\x82\xa4type\xa4Word\xa4text" + b"\x91" * 10_000 + b"\xc0",
        b"\x82\xa4type\xa4Word\xa5other" + b"\x91" * 10_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffx",
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"type": "Word"}),
        msgspec.msgpack.encode({"type": "Word", "text": 5}),
        msgspec.msgpack.encode(Word("x")) + b"\x00",
        msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"x")),
    ],
)
def test_a_frame_that_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        assembler().feed(framed(payload))


def test_a_message_beyond_the_limit_is_not_sent() -> None:
    with pytest.raises(FrameError, match="does not fit"):
        Codec[Message](limit=100).encode(Word("x" * 200))


Ends = tuple[FrameSocket[Message, Message], socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    near, far = socket.socketpair()
    framed_near: FrameSocket[Message, Message] = FrameSocket(near, Message, HELLO)
    yield framed_near, far
    framed_near.close()
    far.close()


def test_a_blocking_end_sends_and_receives_messages(ends: Ends) -> None:
    near, far = ends
    other: FrameSocket[Message, Message] = FrameSocket(far, Message, HELLO)
    other.greet()
    near.greet()
    other.send(Word("a"))
    other.send(Number(2))
    assert (near.receive(), near.receive(5.0)) == (Word("a"), Number(2))
    near.send(Word("back"))
    assert other.receive() == Word("back")


def test_the_blocking_end_has_a_deadline(ends: Ends) -> None:
    near, far = ends
    with pytest.raises(FrameTimeout):
        near.receive(0.0)
    far.sendall(frame(HELLO) + frame(Word("here")))
    assert near.receive(0.0) == Word("here")


@pytest.mark.parametrize("told", [b"", frame(HELLO) + frame(Word("cut"))[:-1]])
def test_the_blocking_end_tells_that_the_peer_has_gone(ends: Ends, told: bytes) -> None:
    near, far = ends
    far.sendall(told)
    far.close()
    with pytest.raises(PeerGone, match="inside a frame" if told else "has closed"):
        near.receive(5.0)
    with pytest.raises(PeerGone):
        near.send(Word("x" * 1_000_000))


def test_shut_wakes_who_waits(ends: Ends) -> None:
    ends[0].shut()
    with pytest.raises(PeerGone):
        ends[0].receive()


def test_a_bell_ends_the_wait_for_a_message(ends: Ends) -> None:
    near, far = ends
    bell = Bell()
    near.hear(bell)
    ringer = threading.Thread(target=bell.ring)
    ringer.start()
    with pytest.raises(FrameTimeout):
        near.receive()
    ringer.join()
    bell.ring()
    assert bell.rung
    far.sendall(frame(HELLO) + frame(Word("here")))
    assert near.receive() == Word("here")  # what is said comes first
    with pytest.raises(FrameTimeout):
        near.receive()
    assert bell.rings() == 2
    assert not bell.rung
    with pytest.raises(FrameTimeout):
        near.receive(0.0)
    bell.close()
