"""The blocking end of a framed connection, for a thread that does nothing else meanwhile."""

import os
import select
import socket
from collections import deque
from contextlib import suppress
from time import monotonic  # noqa: TID251 - a blocking call's own deadline
from typing import Any, Generic

from troupellm.protocol.wire.frames import (
    MAX_FRAME_BYTES,
    READ_BYTES,
    Assembler,
    Codec,
    FrameError,
    Hello,
    PeerGone,
    ReceivedT,
    SentT,
)


class FrameTimeout(FrameError):
    """No message came in time, or a bell was rung; the connection is as it was."""


class Bell:
    """Wakes a thread that waits for messages, for what other threads have to say."""

    def __init__(self) -> None:
        self._heard, self._rope = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._heard, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor that is readable after a ring, until the ring is taken."""
        return self._heard

    def ring(self) -> None:
        """Fit for any thread."""
        os.write(self._rope, b"!")

    @property
    def rung(self) -> bool:
        """Whether `rings` would not wait."""
        return bool(self._poll.poll(0))

    def rings(self) -> int:
        """How often it was rung since the last call; waits for the first time."""
        return len(os.read(self._heard, 64))

    def close(self) -> None:
        """The last ring is over."""
        os.close(self._heard)
        os.close(self._rope)


class FrameSocket(Generic[SentT, ReceivedT]):
    """Owns a connected stream socket. One thread may send while another one receives."""

    def __init__(self, connection: socket.socket, receives: Any, hello: Hello, *, limit: int = MAX_FRAME_BYTES) -> None:
        """receives: union of the message types that may come; hello: said here, and expected of the peer."""
        self._socket = connection
        self._codec: Codec[SentT | Hello] = Codec(limit=limit)
        self._assembler: Assembler[ReceivedT] = Assembler(receives, hello, limit=limit)
        self._messages: deque[ReceivedT] = deque()
        self._hello = hello
        connection.setblocking(True)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._bell: Bell | None = None

    def hear(self, bell: Bell) -> None:
        """From now on `receive` ends when the bell is rung, too."""
        self._bell = bell
        self._poll.register(bell, select.POLLIN)

    def greet(self) -> None:
        """Say Hello; the peer's own is read before its first message.

        Raises:
            PeerGone: the peer has closed.
        """
        self._send(self._hello)

    def send(self, message: SentT) -> None:
        """Blocks while the peer does not read.

        Raises:
            PeerGone: the peer has closed.
            FrameError: the message is too large.
        """
        self._send(message)

    def receive(self, timeout: float | None = None) -> ReceivedT:
        """The next message, within `timeout` seconds (None: however long it takes).

        Raises:
            FrameTimeout: it did not come, or the bell was rung.
            PeerGone: the peer has closed, perhaps inside a frame.
            FrameError: what came is no message; the connection is of no more use.
        """
        deadline = None if timeout is None else monotonic() + timeout
        while not self._messages:
            data = self._read(None if deadline is None else max(0.0, deadline - monotonic()))
            if data is None:
                raise FrameTimeout("no message came")
            self._messages.extend(self._assembler.feed(data))
        return self._messages.popleft()

    def shut(self) -> None:
        """Both directions end, and a thread that is blocked here wakes with PeerGone. Thread-safe; idempotent."""
        with suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor once no thread is blocked here. Idempotent."""
        self.shut()
        self._socket.close()

    def _read(self, timeout: float | None) -> bytes | None:
        """Some bytes; None when there were none in time. The socket's own timeout would bound the sender too."""
        try:
            if timeout is not None or self._bell is not None:
                ready = self._poll.poll(None if timeout is None else 1000 * timeout)
                if self._socket.fileno() not in [descriptor for descriptor, _ in ready]:
                    return None
            data = self._socket.recv(READ_BYTES)
        except OSError as error:
            raise PeerGone(f"the connection is broken: {error.strerror or error}") from None
        if not data:
            raise self._assembler.end()
        return data

    def _send(self, message: SentT | Hello) -> None:
        frame = self._codec.encode(message)
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise PeerGone(f"the connection is broken: {error.strerror or error}") from None
