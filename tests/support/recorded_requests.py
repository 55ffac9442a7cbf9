"""Requests of real clients: an app that keeps them, and the data files that hold them without their texts.

A line of a file is a request. The conversation is written as its difference from that of the request before.
"""

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any

from troupellm.server.base.exchange import CHUNKS, Asgi, Message, Receive, Scope, Send

FIELDS = ("messages", "input")
"""Of the bodies, which hold the conversation."""
_DROPPED = re.compile(r"authorization|x-api-key|host|connection|content-length|accept.*|sec-.*|x-codex-turn-metadata")
"""Headers that are the machine's own, or tell the time."""
_OWN = re.compile(r"Part \d+, line|\[script|\[results so far|x-anthropic-billing-header|Hello from|Summary: ")
"""In lines that this suite or the accounting writes."""
_KEPT = frozenset(
    {
        "type", "role", "name", "id", "call_id", "tool_call_id", "tool_use_id", "data", "encrypted_content",
        "signature", "arguments", "include", "enum", "required", "model", "tool_choice", "effort",
    }
)  # fmt: skip
"""Keys whose texts stay as they are."""
_IDS = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|(?<![0-9A-Za-z])[0-9a-f]{16,}(?![0-9A-Za-z])")
LONGEST_LINE = 24
MOST_LINES = 6


class Recorder:
    """Passes everything on to an app; keeps each POST with its body and its answer, in order."""

    def __init__(self, app: Asgi) -> None:
        self._app = app
        self.kept: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["extensions"].pop(CHUNKS, None)  # or pieces of an answer would pass by on their own way
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        entry: dict[str, Any] = {"path": scope["path"] + (f"?{query}" if query else ""), "headers": headers}
        sent, answered = bytearray(), bytearray()

        async def receiving() -> Message:
            message = await receive()
            sent.extend(message.get("body", b""))
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
                entry["skipped"] = dict(message["headers"]).get(b"x-troupellm-skipped", b"").decode()
            answered.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receiving, sending)
        finally:
            entry |= {"body": json.loads(bytes(sent)), "answer": bytes(answered).decode()}
            self.kept.append(entry)


class Scrubber:
    """Takes the texts of a client, the folders and the random ids out of requests; equal ones stay equal."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        """folders: names that stand for them in the data."""
        self._folders = folders
        self._ids: dict[str, str] = {}

    def request(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        headers = {name: self._line(text) for name, text in entry["headers"].items() if not _DROPPED.fullmatch(name)}
        return {
            "path": entry["path"],
            "headers": headers,
            "skipped": entry["skipped"],
            "body": self._value("", entry["body"]),
        }

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._value(name, part) for name, part in value.items()}
        if isinstance(value, list):
            return [self._value(key, part) for part in value]
        if not isinstance(value, str):
            return value
        return self._line(value) if key in _KEPT else self._text(value)

    def _text(self, text: str) -> str:
        lines = [
            line if len(line) <= LONGEST_LINE or _OWN.search(line) else f"text {_digest(line)}"
            for line in self._line(text).split("\n")
        ]
        if len(lines) > MOST_LINES:
            lines = [*lines[:3], f"lines {_digest(text)}", *lines[-2:]]
        return "\n".join(lines)

    def _line(self, text: str) -> str:
        for folder, name in self._folders.items():
            text = text.replace(folder, name)
        return _IDS.sub(lambda found: self._id(found.group()), text)

    def _id(self, text: str) -> str:
        """Another one of the same form."""
        if text not in self._ids:
            digits = iter(f"{len(self._ids) + 1:0{sum(letter != '-' for letter in text)}x}")
            self._ids[text] = "".join("-" if letter == "-" else next(digits) for letter in text)
        return self._ids[text]


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def conversation(body: Mapping[str, Any]) -> list[Any]:
    """The messages or items of a body, as they are."""
    found = next((body[name] for name in FIELDS if name in body), [])
    return found if isinstance(found, list) else [found]


def num_equal(first: Iterable[Any], second: Iterable[Any]) -> int:
    """How many entries two lists begin with together."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def write_requests(path: Path, requests: Iterable[Mapping[str, Any]]) -> None:
    before: dict[str, Any] = {}
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            body = dict(request["body"])
            (name,) = [name for name in FIELDS if name in body]
            items = body.pop(name)
            kept = num_equal(items, before.get("items", []))
            now = {key: value for key, value in request.items() if key != "body"} | {"name": name}
            now |= {f"body {key}": value for key, value in body.items()}
            line = {key: value for key, value in now.items() if key not in before or before[key] != value}
            line |= {"without": gone} if (gone := sorted(before.keys() - now.keys() - {"items"})) else {}
            line |= {"keep": kept, "more": items[kept:]}
            file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
            before = now | {"items": items}


def read_requests(path: Path) -> list[dict[str, Any]]:
    """The requests: path, headers, skipped, body."""
    found, now, items = [], dict[str, Any](), list[Any]()
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        items = items[: line.pop("keep")] + line.pop("more")
        gone = line.pop("without", [])
        now = {key: value for key, value in now.items() if key not in gone} | line
        body = {key.removeprefix("body "): value for key, value in now.items() if key.startswith("body ")}
        plain = {key: now[key] for key in ("path", "headers", "skipped")}
        found.append(plain | {"body": body | {now["name"]: items}})
    return found
