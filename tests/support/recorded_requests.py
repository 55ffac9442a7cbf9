"""An app that keeps the requests which clients send it, with the answers."""

import json
from typing import Any

from troupellm.server.exchange import Asgi, Message, Receive, Scope, Send


class Recorder:
    """Passes everything on to an app; keeps each POST with its body and its answer, in order."""

    def __init__(self, app: Asgi) -> None:
        self._app = app
        self.kept: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"] + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
        entry: dict[str, Any] = {"method": scope["method"], "path": path, "headers": headers, "status": 0}
        sent, answered = bytearray(), bytearray()

        async def receiving() -> Message:
            message = await receive()
            sent.extend(message.get("body", b""))
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
            answered.extend(message.get("body", b""))
            await send(message)

        self.kept.append(entry)
        try:
            await self._app(scope, receiving, sending)
        finally:
            entry["body"] = bytes(sent).decode(errors="replace")
            entry["answer"] = bytes(answered).decode(errors="replace")

    def bodies(self) -> list[Any]:
        return [json.loads(entry["body"]) for entry in self.kept if entry["method"] == "POST"]
