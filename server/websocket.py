"""Websockets are not spoken here: a handshake is answered as any request that cannot be served."""

from troupellm.server.errors import answer, no_websockets
from troupellm.server.exchange import JSON, Receive, Scope, Send

_EXTENSION = "websocket.http.response"


async def refuse_websocket(scope: Scope, receive: Receive, send: Send, *, request_id: str) -> int:
    """
    Returns:
        the status that the client sees: 426 with an error, or 403 where the server in front can say no more.
    """
    await receive()
    if _EXTENSION not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1000, "reason": "no websockets here"})
        return 403
    shown = answer(no_websockets())
    headers = [
        (b"content-type", JSON),
        (b"content-length", str(len(shown.body)).encode()),
        (b"x-request-id", request_id.encode()),
        *shown.headers,
    ]
    await send({"type": f"{_EXTENSION}.start", "status": shown.status, "headers": headers})
    await send({"type": f"{_EXTENSION}.body", "body": shown.body})
    return shown.status
