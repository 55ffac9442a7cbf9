"""HTTP/2 with limits on what a client may ask for without getting anything, and on what waits for it to read."""

import asyncio
import re

import h2.errors
import h2.events
import h2.exceptions
from hypercorn.events import Closed, Event
from hypercorn.protocol.h2 import H2Protocol
from priority.priority import PriorityError

from troupellm.server.http.http2_flood import Frames, Unsent

_TARGET = re.compile(rb"[\x21-\x7e]+")
_METHOD = re.compile(rb"[A-Za-z]{1,32}")


class Http2(H2Protocol):  # type: ignore[misc]
    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._frames = Frames(asyncio.get_running_loop().time, self._is_open)
        self.connection.incoming_buffer = self._frames

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()  # no task needs to wait for the reader any more

    async def _create_stream(self, request: h2.events.RequestReceived) -> None:
        await super()._create_stream(request)
        self.stream_buffers[request.stream_id] = Unsent(self.context.event_class, self._frames)

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        try:
            for event in events:
                if self._admits(event):
                    await super()._handle_events([event])
            await self._flush()
        except h2.exceptions.DenialOfServiceError as error:
            self.connection.close_connection(error_code=error.error_code)
            await self._flush()
            await self.send(Closed())
        except (h2.exceptions.ProtocolError, PriorityError):  # a stream or the connection ended meanwhile
            await self._flush()
            await self.send(Closed())

    def _is_open(self, number: int) -> bool:
        stream = self.connection.streams.get(number)
        return stream is not None and stream.open

    def _admits(self, event: h2.events.Event) -> bool:
        """Whether hypercorn can handle it; what it cannot is answered here."""
        if isinstance(event, h2.events.PriorityUpdated):
            return False  # the standard has withdrawn priorities, and a tree of them can be made to grow
        if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
            self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            return False  # the rest of a body whose request was answered already
        if isinstance(event, h2.events.StreamReset) and not event.remote_reset:
            self._frames.spend()  # the client has broken a rule to have its own request reset, which costs as much
        if isinstance(event, h2.events.RequestReceived) and not self._is_open(event.stream_id):
            self._frames.spend()
            return False  # it was reset in the same read
        if isinstance(event, h2.events.RequestReceived) and not _is_plain(event):
            self.connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
            self._frames.spend()
            return False
        return True


def _is_plain(event: h2.events.RequestReceived) -> bool:
    pseudo = {bytes(name): bytes(value) for name, value in event.headers or () if bytes(name).startswith(b":")}
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    return bool(_METHOD.fullmatch(method)) and method != b"CONNECT" and bool(_TARGET.fullmatch(target))
