"""The protocol by which two engines exchange blocks over TCP.

The server begins with a challenge. The client answers it with proof that it knows the secret, a challenge of its own
and the kind of blocks it wants; the server proves the same. Proofs are HMAC-SHA-256 over both challenges and all
earlier messages, under a key derived from the shared secret, with another label for each side. Then the client sends
any number of questions, without waiting for answers in between, and the server answers in order:

    contains (keys)  -> how many of them there are, from the first on
    get (keys)       -> for each key nothing, or its header and block
    reset ()         -> 0, when it has forgotten all blocks

A length is checked against its limit before anything is read; nothing is ever unpickled. A block is accepted only for
its own tag (see `BlockSignature`), from any sender. Content is not encrypted.
"""

import hmac
import socket
import struct
from collections.abc import Sequence
from time import monotonic
from typing import Final

MAGIC: Final = b"TROUPEKP"
VERSION: Final = 2
CHALLENGE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MOST_KEYS: Final = 4096
"""Most keys of one question."""
MOST_KEY_BYTES: Final = 64
MOST_QUESTION_BYTES: Final = MOST_KEYS * (1 + MOST_KEY_BYTES)

CONTAINS, GET, RESET = 1, 2, 3
ACCEPTED, OTHER_BLOCKS = 0, 1

GREETING = struct.Struct(f"<8sHxx{CHALLENGE_BYTES}s")
"""Magic, version, challenge."""
CLAIM = struct.Struct(f"<8sHxxI32s{CHALLENGE_BYTES}s")
"""Magic, version, block bytes, fingerprint of the model, challenge; the proof follows."""
VERDICT = struct.Struct(f"<Bxxx{PROOF_BYTES}s")
QUESTION = struct.Struct("<BxHI")
"""Kind of question, number of keys, bytes of the keys that follow: each one a length and the key."""
COUNT = struct.Struct("<I")
PRESENT = struct.Struct("<B")


class WireError(Exception):
    """The other side does not speak this protocol, or does not know the secret: the connection is of no use."""


class WireClosed(WireError):
    """The other side has gone."""


class Wire:
    """A connected socket with a deadline for the exchange under way."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._deadline = 0.0

    def within(self, seconds: float) -> None:
        """Set the deadline of the following operations; one that exceeds it raises `TimeoutError`."""
        self._deadline = monotonic() + seconds

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """
        Raises:
            OSError: the connection is broken, or too slow (TimeoutError).
        """
        for part in parts:
            self._socket.settimeout(self._left())
            self._socket.sendall(part)

    def receive(self, count: int) -> bytes:
        """As many bytes.

        Raises:
            WireClosed: the other side closed before.
            OSError: the connection is broken, or too slow (TimeoutError).
        """
        buffer = bytearray(count)
        self.receive_into(memoryview(buffer))
        return bytes(buffer)

    def receive_into(self, into: memoryview) -> None:
        """As `receive`."""
        while into:
            self._socket.settimeout(self._left())
            received = self._socket.recv_into(into)
            if not received:
                raise WireClosed("the peer has closed")
            into = into[received:]

    def shut(self) -> None:
        """Shut the connection down, from any thread: a thread that waits on it wakes at once."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was closed already

    def close(self) -> None:
        self._socket.close()

    def _left(self) -> float:
        left = self._deadline - monotonic()
        if left <= 0.0:
            raise TimeoutError("the peer is too slow")
        return left


def proof(key: bytes, side: bytes, greeting: bytes, claim: bytes) -> bytes:
    """The proof that `side` (server or client) knows the key; over all earlier messages."""
    return hmac.digest(key, side + b"\0" + greeting + claim, "sha256")


def question(what: int, keys: Sequence[bytes]) -> bytes:
    """
    Raises:
        ValueError: too many keys, or one is too long.
    """
    if not 0 < len(keys) <= MOST_KEYS or not all(0 < len(key) <= MOST_KEY_BYTES for key in keys):
        raise ValueError("a question has 1 to 4096 keys of 1 to 64 bytes")
    body = b"".join(bytes((len(key),)) + key for key in keys)
    return QUESTION.pack(what, len(keys), len(body)) + body


def reset_question() -> bytes:
    return QUESTION.pack(RESET, 0, 0)


def read_question(head: bytes) -> tuple[int, int, int]:
    """The kind of question, the number of keys and the bytes that they take.

    Raises:
        WireError: it is none of the questions.
    """
    what, count, size = QUESTION.unpack(head)
    if (what, count, size) == (RESET, 0, 0):
        return RESET, 0, 0
    if what not in (CONTAINS, GET) or not 0 < count <= MOST_KEYS or not 0 < size <= MOST_QUESTION_BYTES:
        raise WireError("the peer asked something unknown")
    return what, count, size


def read_keys(body: bytes, count: int) -> list[bytes]:
    """
    Raises:
        WireError: these are not as many keys.
    """
    keys, place = list[bytes](), 0
    while place < len(body) and len(keys) < count:
        length = body[place]
        key = body[place + 1 : place + 1 + length]
        if not 0 < length <= MOST_KEY_BYTES or len(key) != length:
            raise WireError("the peer sent a key that is none")
        keys.append(key)
        place += 1 + length
    if place != len(body) or len(keys) != count:
        raise WireError("the peer sent another number of keys than it said")
    return keys
