"""Refusals of WebSocket handshakes: they are answered as any request that cannot be served."""

from troupellm.protocol.errors import TroupeError
from troupellm.server.base.errors import answer
from troupellm.server.base.exchange import JSON, Receive, Scope, Send

_EXTENSION = "websocket.http.response"


async def refuse_websocket(scope: Scope, receive: Receive, send: Send, error: TroupeError, *, request_id: str) -> int:
    """
    Returns:
        the status that the client sees: that of the error, or 403 where the server in front can say no more.
    """
    if _EXTENSION not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1000, "reason": "refused"})
        return 403
    shown = answer(error, shape="responses")
    headers = [
        (b"content-type", JSON),
        (b"content-length", str(len(shown.body)).encode()),
        (b"x-request-id", request_id.encode()),
        *shown.headers,
    ]
    await send({"type": f"{_EXTENSION}.start", "status": shown.status, "headers": headers})
    await send({"type": f"{_EXTENSION}.body", "body": shown.body})
    return shown.status
