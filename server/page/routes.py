"""The page at `/`, its files below `/ui`, and the frames of the engine's picture."""

import hashlib
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from typing import Any

import anyio
import msgspec

from troupellm.protocol.api import admin
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.messages.live_view import LiveView
from troupellm.server.access.host_and_origin import is_loopback
from troupellm.server.admin import probes
from troupellm.server.base.errors import origin_not_allowed
from troupellm.server.base.exchange import EVENTS, Exchange
from troupellm.server.base.router import Route
from troupellm.server.base.sse import open_events
from troupellm.server.host.server_state import ServerState
from troupellm.server.page.live import LiveFrames

FILES: Mapping[str, bytes] = {
    "page.css": b"text/css; charset=utf-8",
    "main.js": b"text/javascript; charset=utf-8",
    "api.js": b"text/javascript; charset=utf-8",
    "chat.js": b"text/javascript; charset=utf-8",
    "conversations.js": b"text/javascript; charset=utf-8",
    "engine.js": b"text/javascript; charset=utf-8",
    "drawing.js": b"text/javascript; charset=utf-8",
    "markdown.js": b"text/javascript; charset=utf-8",
}
"""Files of the page with their media types."""
_HTML = b"text/html; charset=utf-8"
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


def shows_page(config: ServerConfig, *, mounted: bool) -> bool:
    """By itself the page is there for this machine only, and not within another application."""
    if config.ui is not None:
        return config.ui
    return not mounted and _is_local(config)


def _is_local(config: ServerConfig) -> bool:
    """Whether browsers of this machine alone reach the server. They reach a Unix socket, or a server that goes by other
    names, through a proxy, which may serve everybody."""
    named = all(is_loopback(name) for name in config.allowed_hosts)
    return config.uds is None and is_loopback(config.host) and named


def routes(host: ServerState, *, mounted: bool, guarded: bool = False) -> list[Route]:
    """None where the page is off.

    Args:
        guarded: there is an admin key; API processes know its digest only, and not from the configuration.
    """
    if not shows_page(host.config, mounted=mounted):
        return []
    static = Static()
    pages = [
        Route(
            method="GET",
            path=f"/ui/{name}",
            handler=partial(static.file, name),
            scope="open",  # holds nothing secret, and no browser could send a key for it
            summary="A file of the page.",
            answers=media.decode().partition(";")[0],
        )
        for name, media in FILES.items()
    ]
    root = Route(
        method="GET",
        path="/",
        handler=partial(_root, host, static),
        scope="open",
        summary="The page, for browsers; that the server is there, for others.",
        answers="text/plain" if host.config.ollama else "application/json",
    )
    return [root, *pages, *_events(host, guarded=guarded)]


def _events(host: ServerState, *, guarded: bool) -> list[Route]:
    """Frames need the admin key where there is one. Without it they are for this machine alone, without names of keys;
    a page beyond loopback has none then."""
    config = host.config
    guarded = guarded or bool(config.admin_api_key or config.admin_uds)
    if not guarded and not _is_local(config):
        return []
    names = msgspec.json.encode(admin.LiveViewQuery(names=guarded))
    frames = LiveFrames(lambda: host.administer("live_view", names))
    return [
        Route(
            method="GET",
            path="/debug/events",
            handler=partial(_send_frames, host, frames),
            scope="admin" if guarded else "api",
            query=admin.NoArguments,
            summary="The picture of the engine that the page draws, as server-sent events.",
            answers="text/event-stream",
            events=(LiveView,),
        )
    ]


class Static:
    """The files of the page, read once, with their tags."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[bytes, bytes]] = {}

    async def file(self, name: str, exchange: Exchange, _: Any) -> None:
        await self.send(exchange, name, FILES[name])

    async def send(self, exchange: Exchange, name: str, media: bytes) -> None:
        """200 with the file, or 304 where the browser has it."""
        if name not in self._read:
            content = files("troupellm.server.page").joinpath("static", name).read_bytes()
            self._read[name] = content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'.encode()
        content, tag = self._read[name]
        headers = (*_HEADERS, (b"etag", tag), (b"vary", b"accept"))
        known = exchange.header(b"if-none-match") or ""
        if tag.decode() in known:
            await exchange.respond(304, b"", headers, content_type=media)
        else:
            await exchange.respond(200, content, headers, content_type=media)


async def _root(host: ServerState, static: Static, exchange: Exchange, body: None) -> None:
    if "text/html" in (exchange.header(b"accept") or ""):
        await static.send(exchange, "index.html", _HTML)
    else:
        await probes.welcome(host, exchange, body)


async def _send_frames(host: ServerState, frames: LiveFrames, exchange: Exchange, _: None) -> None:
    """Until the server drains or the viewer leaves.

    Raises:
        HttpError: 403, a page of another origin asks, which could not read the frames, but would make the engine draw.
    """
    host.require()
    if exchange.header(b"sec-fetch-site") in ("cross-site", "same-site"):
        raise origin_not_allowed()
    if exchange.method == "HEAD":
        await exchange.respond(200, b"", content_type=EVENTS)
        return
    failures: list[Exception] = []
    with frames.watching():
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.watch, group.cancel_scope)
            try:
                await _send(host, frames, exchange)
            except Exception as error:  # raised below, where it stands alone
                failures.append(error)
            group.cancel_scope.cancel()
    if failures:
        raise failures[0]


async def _send(host: ServerState, frames: LiveFrames, exchange: Exchange) -> None:
    number, frame = await frames.next(-1)
    async with open_events(exchange, 0.0) as events:
        await events.send(frame)
        while not host.draining:
            number, frame = await frames.next(number)
            await events.send(frame)
        await events.finish(b"", b"")
