"""Requests that come from inside: the same routes, validation and answers, without a socket."""

import secrets
from collections.abc import Iterable

import anyio
import msgspec

from troupellm.protocol.api.caller import Caller
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.errors import answer, flatten
from troupellm.server.base.exchange import Exchange, Message
from troupellm.server.base.json_body import UnknownFields, decode_body
from troupellm.server.base.router import Route, Router
from troupellm.server.host.server_state import ServerState

LOW_PRIORITY = 1000
"""Of requests that say nothing, under the priority policy: the others come first."""


class Answered(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    """JSON."""
    request_id: str
    retry_after: float | None = None
    """Seconds; None where the same request would fail again."""


class Inside:
    """Answers POST requests with a JSON body and a whole JSON answer."""

    def __init__(self, host: ServerState, routes: Iterable[Route]) -> None:
        self._host = host
        table = [route for route in routes if is_plain(route)]
        self._router = Router(table)
        self._unknown = UnknownFields()
        self.urls = frozenset(route.path for route in table)

    async def post(self, url: str, raw: bytes, *, caller: Caller) -> Answered:
        """
        Args:
            url: one of `urls`.
            raw: the body.
            caller: the owner of the line.
        """
        request_id, sent = secrets.token_hex(16), list[Message]()

        async def receive() -> Message:
            await anyio.sleep_forever()
            raise AssertionError("unreachable")

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"method": "POST", "path": url, "headers": ((b"content-length", str(len(raw)).encode()),)}
        exchange = Exchange(scope, receive, send, request_id=request_id, write_timeout=0.0)
        exchange.caller, exchange.body_bytes = caller, len(raw)
        try:
            route, _ = self._router.match("POST", url.encode())
            exchange.route, exchange.error_shape = route.path, route.error_shape
            self._host.require()
            body = await decode_body(raw, route.body, self._unknown)
            if getattr(body, "stream", None):
                raise InvalidRequest("stream: a line of a batch has one answer", param="stream")
            if getattr(body, "background", None):  # no client would ever see its end
                message = "background: a line of a batch has its answer in the batch's output"
                raise InvalidRequest(message, param="background", code="unsupported_parameter")
            if "priority" in body.__struct_fields__ and body.priority is None:
                body = msgspec.structs.replace(body, priority=LOW_PRIORITY)
            await route.handler(exchange, body)
        except (Exception, BaseExceptionGroup) as error:
            # 429 in every API's shape: after it a line waits as long as it takes.
            error_answer = answer(
                flatten(error), shape=exchange.error_shape, renames=exchange.renames, overload_status=429
            )
            await exchange.respond_error(error_answer)
        return _answered(sent, request_id)


def is_plain(route: Route) -> bool:
    """Whether a line of a batch may ask for it: one JSON body in, one JSON answer out, with an API key's scope."""
    other = route.tail or route.lines or "{" in route.path or route.path.endswith(("/batches", "/conversations"))
    return route.method == "POST" and route.scope == "api" and route.body is not None and not other


def _answered(sent: list[Message], request_id: str) -> Answered:
    headers: dict[bytes, bytes] = dict(sent[0]["headers"])
    status: int = sent[0]["status"]
    body = b"".join([message["body"] for message in sent[1:]])
    retry: float | None = None
    if status != 200 and headers.get(b"x-should-retry") == b"true":
        retry = float(headers.get(b"retry-after", b"1"))
    return Answered(status, body, request_id, retry)
