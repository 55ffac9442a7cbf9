"""Just enough HTTP/1.1 for a load generator: one request per connection, the reply parsed as its bytes come.

A general client costs more per chunk than the server under test; this one costs a few microseconds.
"""

from collections.abc import Mapping
from typing import Literal

MAX_HEAD_BYTES = 65_536

State = Literal["head", "size", "chunk", "chunk_end", "trailer", "length", "until_close", "complete"]


class ProtocolError(Exception):
    """The reply is not HTTP/1.1, or it ended early."""


def request_bytes(method: str, host: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "connection: close", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class ResponseParser:
    """Sans I/O. `feed` gives decoded body bytes; `status` is 0 until the head is there."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._state: State = "head"
        self._buffer = bytearray()
        self._left = 0

    @property
    def complete(self) -> bool:
        return self._state == "complete"

    def feed(self, data: bytes) -> bytes:
        """Raises ProtocolError."""
        self._buffer += data
        body = bytearray()
        while self._buffer and self._advance(body):
            pass
        return bytes(body)

    def eof(self) -> None:
        """The peer closed. Raises ProtocolError when the reply is not whole."""
        if self._state == "until_close":
            self._state = "complete"
        if self._state != "complete":
            where = "before the reply" if self._state == "head" else "in the middle of the reply"
            raise ProtocolError(f"connection closed {where}")

    def _advance(self, body: bytearray) -> bool:
        """Consume one unit of the buffer; False when more bytes are needed."""
        match self._state:
            case "head":
                return self._head()
            case "size":
                return self._size()
            case "chunk" | "length":
                return self._piece(body)
            case "chunk_end":
                return self._line() is not None and self._go("size")
            case "trailer":
                line = self._line()
                return line is not None and (line != b"" or self._go("complete"))
            case "until_close":
                body += self._buffer
                self._buffer.clear()
                return False
            case "complete":
                self._buffer.clear()
                return False

    def _go(self, state: State) -> bool:
        self._state = state
        return True

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ProtocolError("a line of the reply is too long")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ProtocolError("the head of the reply is too long")
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
            raise ProtocolError("the reply is not HTTP/1.1")
        if 100 <= int(parts[1]) < 200:
            return True
        self.status = int(parts[1])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return self._go("size")
        length = self.headers.get("content-length")
        if length is None:
            return self._go("until_close")
        self._left = int(length) if length.isdigit() else 0
        return self._go("length" if self._left else "complete")

    def _size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            raise ProtocolError("a chunk of the reply has no size") from None
        return self._go("chunk" if self._left else "trailer")

    def _piece(self, body: bytearray) -> bool:
        taken = min(self._left, len(self._buffer))
        body += self._buffer[:taken]
        del self._buffer[:taken]
        self._left -= taken
        if self._left:
            return False
        return self._go("chunk_end" if self._state == "chunk" else "complete")
