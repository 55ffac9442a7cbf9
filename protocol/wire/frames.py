"""How messages cross a process border: msgspec's MessagePack behind a length, nothing else, and never pickle.

A frame is four bytes (little-endian length of the payload) and the payload: one message of a closed union of tagged
Structs. The length is checked against a cap before anything is done with it, and no memory is taken from a declared
length: what is held is what has come. The first frame each way is a `Hello`; a peer that says something else, or speaks
another version, is dropped. All of it is plain computation: `frame_socket` blocks, `actors/runtime/link` awaits.
"""

from typing import Any, Generic, TypeVar

import msgspec

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 * 2**20
"""Far more than a step of full context windows takes."""
HELLO_BYTES = 256
READ_BYTES = 2**18
"""How much an end asks its socket for at once."""

SentT = TypeVar("SentT")
ReceivedT = TypeVar("ReceivedT")


class FrameError(Exception):
    """The bytes are no frame, or the message is not allowed here: drop the peer without an answer."""


class PeerGone(FrameError):
    """The other end has closed, or has died."""


class Hello(msgspec.Struct, frozen=True, tag="troupellm"):
    """The first thing that each end says."""

    link: str
    """The purpose of the connection: worker, front."""
    version: str
    """Both ends of a link must be of one version: they are one program."""


class Codec(Generic[SentT]):
    """Makes frames. One per sending end; holds a buffer, so calls come from one thread at a time."""

    def __init__(self, *, limit: int = MAX_FRAME_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._limit = limit
        self._buffer = bytearray()

    def encode(self, message: SentT) -> bytes:
        """The message's frame, header included.

        Raises:
            FrameError: the message is larger than a frame may be.
        """
        self._encoder.encode_into(message, self._buffer, HEADER_BYTES)
        length = len(self._buffer) - HEADER_BYTES
        if length > self._limit:
            self._buffer = bytearray()
            raise FrameError(f"a message of {length} bytes does not fit a frame of {self._limit}")
        self._buffer[:HEADER_BYTES] = length.to_bytes(HEADER_BYTES, "little")
        return bytes(self._buffer)


class Assembler(Generic[ReceivedT]):
    """Turns bytes, in chunks of any size, into messages. Unusable after a `FrameError`.

    Before the first message the peer must have said `Hello`; `greeted` tells.
    """

    def __init__(self, messages: Any, hello: Hello, *, limit: int = MAX_FRAME_BYTES) -> None:
        """messages: the closed union of message types that may come; hello: what the peer must say first."""
        self._decoder: msgspec.msgpack.Decoder[ReceivedT] = msgspec.msgpack.Decoder(messages)
        self._hello = hello
        self._limit = limit
        self._held = bytearray()
        self.greeted = False

    def feed(self, data: bytes | bytearray | memoryview) -> list[ReceivedT]:
        """The messages that `data` completes, in order.

        Raises:
            FrameError: see the class.
        """
        held = self._held
        held += data
        messages: list[ReceivedT] = []
        begin = 0
        while len(held) - begin >= HEADER_BYTES:
            length = int.from_bytes(held[begin : begin + HEADER_BYTES], "little")
            self._check(length)
            end = begin + HEADER_BYTES + length
            if len(held) < end:
                break
            with memoryview(held) as view:
                payload = bytes(view[begin + HEADER_BYTES : end])
            if self.greeted:
                messages.append(self._message(payload))
            else:
                self._greet(payload)
            begin = end
        if begin:
            del held[:begin]
        return messages

    def end(self) -> PeerGone:
        """The error for the end of the stream at this point."""
        if self._held:
            return PeerGone(f"the other end closed inside a frame, after {len(self._held)} bytes of it")
        return PeerGone("the other end has closed")

    def _check(self, length: int) -> None:
        limit = self._limit if self.greeted else min(self._limit, HELLO_BYTES)
        if not 0 < length <= limit:
            raise FrameError(f"a frame of {length} bytes was announced; 1 to {limit} are allowed")

    def _greet(self, payload: bytes) -> None:
        try:
            hello = msgspec.msgpack.decode(payload, type=Hello)
        except (ValueError, RecursionError):  # msgspec's own errors are ValueErrors
            raise FrameError("the peer does not speak this protocol") from None
        if hello.link != self._hello.link:
            raise FrameError(f"the peer is no {self._hello.link}")
        if hello.version != self._hello.version:
            raise FrameError(f"the peer has version {hello.version[:32]!a}, this end {self._hello.version!a}")
        self.greeted = True

    def _message(self, payload: bytes) -> ReceivedT:
        try:
            return self._decoder.decode(payload)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a frame of {len(payload)} bytes holds no message: {str(error)[:200]}") from None
