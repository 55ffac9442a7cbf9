"""Exchanges without a server: messages in, messages out."""

from collections.abc import Callable, Iterable
from typing import Any

import anyio
import pytest

from troupellm.server.base.exchange import Exchange


class Wire:
    """Plays the ASGI server: gives the body's pieces, then silence, and keeps what was sent."""

    def __init__(self, pieces: Iterable[bytes] = (b"",), *, stalled: bool = False, stops: bool = False) -> None:
        """
        Args:
            stalled: nothing can be sent.
            stops: the body has no end.
        """
        self.messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
        ]
        if not stops:
            self.messages.append({"type": "http.request", "body": b"", "more_body": False})
        self.taken = 0
        self.sent: list[dict[str, Any]] = []
        self.stalled = stalled

    async def receive(self) -> dict[str, Any]:
        if self.taken == len(self.messages):
            await anyio.sleep_forever()
        self.taken += 1
        return self.messages[self.taken - 1]

    async def send(self, message: Any) -> None:
        if self.stalled:
            await anyio.sleep_forever()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])


@pytest.fixture
def make_wire() -> type[Wire]:
    return Wire


@pytest.fixture
def make_exchange() -> Callable[..., Exchange]:
    def make(
        wire: Wire,
        *,
        headers: dict[str, str] | None = None,
        method: str = "POST",
        write_timeout: float = 0.05,
        **scope: Any,
    ) -> Exchange:
        given = {"content-type": "application/json"} if headers is None else headers
        fields = {
            "type": "http",
            "method": method,
            "path": "/v1/completions",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        return Exchange(fields | scope, wire.receive, wire.send, request_id="test-id", write_timeout=write_timeout)

    return make
