"""A plain HTTP/2 client over a raw connection, for sending what no ordinary client sends."""

from typing import Any

import anyio
import h2.config
import h2.connection
import h2.events
from hyperframe.frame import Frame


class StrangerHttp2:
    """Speaks prior-knowledge HTTP/2; `events` are all that came back."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self.stream = stream
        self.connection = h2.connection.H2Connection(
            config=h2.config.H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.connection.initiate_connection()
        self.events: list[Any] = []
        self.closed = False
        self._unsent = b""

    @classmethod
    async def connect(cls, port: int) -> "StrangerHttp2":
        client = cls(await anyio.connect_tcp("127.0.0.1", port))
        await client.flush()
        return client

    def request(
        self, method: bytes, path: bytes, *more: tuple[bytes, bytes], end: bool = True, authority: bytes = b"localhost"
    ) -> int:
        number = self.connection.get_next_available_stream_id()
        headers = [(b":method", method), (b":path", path), (b":scheme", b"http"), (b":authority", authority), *more]
        self.connection.send_headers(number, headers, end_stream=end)
        return number

    def frame(self, frame: Frame) -> None:
        """A frame that the client's own state machine would not let pass, behind what there is."""
        self._unsent += self.connection.data_to_send() + frame.serialize()

    async def flush(self) -> None:
        data, self._unsent = self._unsent + self.connection.data_to_send(), b""
        if data and not self.closed:
            try:
                await self.stream.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self.closed = True

    async def read(self) -> None:
        """One piece of what came back."""
        try:
            data = await self.stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            self.closed = True
            return
        self.events += self.connection.receive_data(data)
        await self.flush()

    async def answer(self, number: int, timeout: float = 20.0) -> tuple[int, bytes]:
        """Status and body of a request; status 0 for a stream that was reset, or a connection that ended."""
        with anyio.fail_after(timeout):
            while True:
                mine = [event for event in self.events if getattr(event, "stream_id", None) == number]
                kinds = [type(event) for event in mine]
                if h2.events.StreamEnded in kinds:
                    heads = [event for event in mine if isinstance(event, h2.events.ResponseReceived)]
                    data = b"".join(event.data for event in mine if isinstance(event, h2.events.DataReceived))
                    return int(dict(heads[0].headers)[b":status"]), data
                if self.closed or h2.events.StreamReset in kinds or self.ended:
                    return 0, b""
                await self.read()

    @property
    def ended(self) -> Any:
        """The server's GOAWAY."""
        return next((event for event in self.events if isinstance(event, h2.events.ConnectionTerminated)), None)

    async def until_ended(self, timeout: float = 20.0) -> Any:
        with anyio.fail_after(timeout):
            while not self.closed and self.ended is None:
                await self.read()
        return self.ended

    async def close(self) -> None:
        await self.stream.aclose()
