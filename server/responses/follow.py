"""The events of a background response as a stream, from any point on, also if another process generates it."""

import anyio
import msgspec

from troupellm.protocol.api.response_events import ErrorEvent, ResponseFailed
from troupellm.protocol.api.response_objects import ResponseObject
from troupellm.server.base.errors import HttpError
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.sse import open_events
from troupellm.server.host.server_state import ServerState
from troupellm.server.responses.builder import encoded, error_event
from troupellm.server.responses.jobs import Jobs
from troupellm.server.storage.responses_rows import StoredResponse

POLL_SECONDS = 0.2
"""How often the log of another process's response is looked at."""
_TERMINAL = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n")


async def follow(host: ServerState, jobs: Jobs, exchange: Exchange, owner: str, name: str, after: int = -1) -> None:
    """Send the events that come after number `after`, until the response has ended."""
    number, closed = after + 1, False
    exchange.error_event = lambda answer: error_event(number, answer)
    async with open_events(exchange, host.config.sse_keep_alive_interval) as events:
        while True:
            job = jobs.find(name)
            news = job.news if job is not None else None
            stored, rows = await host.responses.logged(owner, name, number)
            data = b"".join([_from(number, first, chunk) for first, chunk in rows])
            if rows:
                first, chunk = rows[-1]
                number = max(number, first + chunk.count(b"\n\n"))
                closed = any(mark in chunk for mark in _TERMINAL)
            if stored is None or not stored.running or not stored.logged:
                await events.finish(data if closed else data + _farewell(stored, number), b"")
                return
            if data:
                await events.send(data)
            elif news is not None:
                await news.wait()
            else:
                await anyio.sleep(POLL_SECONDS)


def not_found() -> HttpError:
    return HttpError(404, "no response with this id is kept here", code="response_not_found")


def _from(number: int, first: int, chunk: bytes) -> bytes:
    """A chunk of events, which are numbered from `first`, without those below `number`."""
    if first >= number:
        return chunk
    return b"".join([event + b"\n\n" for event in chunk.split(b"\n\n")[number - first : -1]])


def _farewell(stored: StoredResponse | None, number: int) -> bytes:
    """The end of a response that could not say itself how it has ended."""
    if stored is None:
        error = ErrorEvent(code="response_not_found", message="the response was deleted", param=None)
        return encoded([msgspec.structs.replace(error, sequence_number=number)])
    if stored.running or not stored.logged:
        message = "the events of this response are too many to be kept; it can be retrieved once it has ended"
        return encoded([ErrorEvent(sequence_number=number, code="stream_too_long", message=message, param=None)])
    response = msgspec.json.decode(stored.body, type=ResponseObject)
    why = "the response was cancelled" if response.error is None else response.error.message
    code = "response_cancelled" if stored.status == "cancelled" else "server_error"
    error = ErrorEvent(sequence_number=number, code=code, message=why, param=None)
    return encoded([error, ResponseFailed(sequence_number=number + 1, response=response)])
