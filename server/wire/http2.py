"""HTTP/2 with limits on what a client may ask for without getting anything: resets, pings and settings cost CPU."""

import asyncio
import re

import h2.errors
import h2.events
import h2.exceptions
from hypercorn.events import Closed
from hypercorn.protocol.h2 import H2Protocol

BURST = 1_000
"""Frames without use that may come at once ..."""
PER_SECOND = 100
"""... and after that."""
_NOISE = (
    h2.events.StreamReset,
    h2.events.PingReceived,
    h2.events.RemoteSettingsChanged,
    h2.events.PriorityUpdated,
    h2.events.UnknownFrameReceived,
)
_TARGET = re.compile(rb"[\x21-\x7e]+")
_METHOD = re.compile(rb"[A-Za-z]{1,32}")


class Http2(H2Protocol):  # type: ignore[misc]
    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._clock = asyncio.get_running_loop().time
        self._allowance = float(BURST)
        self._counted = self._clock()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        try:
            for event in events:
                if isinstance(event, _NOISE) and not self._afford():
                    self.connection.close_connection(error_code=h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
                    await self._flush()
                    await self.send(Closed())
                    return
                if self._admits(event):
                    await super()._handle_events([event])
            await self._flush()
        except h2.exceptions.ProtocolError:  # a stream or the connection ended meanwhile
            await self._flush()
            await self.send(Closed())

    def _afford(self) -> bool:
        now = self._clock()
        self._allowance = min(BURST, self._allowance + (now - self._counted) * PER_SECOND)
        self._counted = now
        self._allowance -= 1
        return self._allowance >= 0

    def _admits(self, event: h2.events.Event) -> bool:
        """Whether hypercorn can handle it; what it cannot is answered here."""
        if isinstance(event, h2.events.PriorityUpdated):
            return False  # the standard has withdrawn priorities, and a tree of them can be made to grow
        if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
            self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            return False  # the rest of a body whose request was answered already
        if isinstance(event, h2.events.RequestReceived) and not _is_plain(event):
            self.connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
            return False
        return True


def _is_plain(event: h2.events.RequestReceived) -> bool:
    pseudo = {bytes(name): bytes(value) for name, value in event.headers or () if bytes(name).startswith(b":")}
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    return bool(_METHOD.fullmatch(method)) and method != b"CONNECT" and bool(_TARGET.fullmatch(target))
