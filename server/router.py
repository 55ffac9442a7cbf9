"""Exact routes. One spelling per path: no trailing slash, no doubled slash, no dots, no percent-encoding."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from troupellm.server.errors import HttpError, method_not_allowed, unknown_url
from troupellm.server.exchange import Exchange

Handler = Callable[[Exchange, Any], Awaitable[None]]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    """Type of the JSON body; None reads no body."""
    open: bool = False
    """Needs no key, is not logged, and is answered in every state of the server."""
    tail: bool = False
    """The path is a prefix; what follows (slashes included) is handed on as `Exchange.tail`."""


class Router:
    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[bytes, dict[str, Route]] = {}
        self._tails: dict[bytes, dict[str, Route]] = {}
        for route in routes:
            table = self._tails if route.tail else self._exact
            table.setdefault(route.path.encode(), {})[route.method] = route
        self.open_paths = frozenset(
            path for path, methods in self._exact.items() if all(route.open for route in methods.values())
        )

    def below(self, raw_path: bytes, root_path: str) -> bytes:
        """The path without the prefix under which this app is mounted, or which `--root-path` names.

        Whether the prefix still stands in the path depends on who is in front: a mounting framework leaves it there, a
        proxy has often stripped it. So it is taken off only where it is there, whole, and what remains is one of our
        routes; `/v1/models` stays what it is below a root path of `/v1`.
        """
        root = root_path.rstrip("/").encode()
        if not root or not raw_path.startswith(root + b"/"):
            return raw_path
        rest = raw_path[len(root) :]
        try:
            known = rest in self._exact or bool(self._match_tail(rest))
        except HttpError:
            known = False
        return rest if known else raw_path

    def match(self, method: str, raw_path: bytes) -> tuple[Route, str]:
        """The route and the decoded tail of the path ("" unless the route takes one).

        Raises:
            HttpError: 404 unknown path, 405 with `Allow` for the wrong method.
        """
        methods, tail = self._exact.get(raw_path), ""
        if methods is None:
            methods, tail = self._match_tail(raw_path)
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            names = sorted({*methods, "HEAD"} if "GET" in methods else methods)
            raise method_not_allowed(", ".join(names))
        return route, tail

    def _match_tail(self, raw_path: bytes) -> tuple[dict[str, Route], str]:
        for prefix, methods in self._tails.items():
            if raw_path.startswith(prefix):
                tail = unquote_to_bytes(raw_path[len(prefix) :]).decode("utf-8", "replace")
                if tail and all(part not in ("", ".", "..") for part in tail.split("/")):
                    return methods, tail
        raise unknown_url()
