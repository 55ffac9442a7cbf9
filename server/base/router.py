"""Exact routes. One spelling per path: no trailing slash, no doubled slash, no dots, no percent-encoding.

The table of routes is also what the OpenAPI document is made from, so a route says all that a client must know of it.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal
from urllib.parse import unquote_to_bytes

import msgspec

from troupellm.server.base.errors import ErrorShape, method_not_allowed, unknown_url
from troupellm.server.base.exchange import Exchange

Handler = Callable[[Exchange, Any], Awaitable[None]]
RouteScope = Literal["open", "api", "admin"]
"""open: needs no key, is not logged, and is answered in every state of the server; api: an API key; admin: the admin
key or socket, without which the route does not exist."""

_NAME = re.compile(r"\{([a-z_]+)\}")
MAX_TAIL = 512
"""Characters of a name in a path."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    """`{names}` stand for one part of the path each, and are handed on as `Exchange.path_values`."""
    handler: Handler
    body: Any = None
    """Type of the JSON body (a Struct, or a union of some); None reads no body."""
    query: type[msgspec.Struct] | None = None
    """The type of the query string, passed on as `Exchange.query`; None ignores it."""
    media: tuple[str, ...] = ()
    """Media types of a body that is not JSON; the handler reads it, with `BodyReader`."""
    form: type[msgspec.Struct] | None = None
    """Fields of a multipart form beside its `file`; what says so here is what the handler checks them against."""
    scope: RouteScope = "api"
    tail: bool = False
    """The path is a prefix; what follows (slashes included) is handed on as `Exchange.tail`."""
    error_shape: ErrorShape = "openai"
    summary: str = ""
    response: Any = None
    """Type of the JSON answer; None where it is no JSON, or has no fixed form."""
    answers: str = "application/json"
    """Media type of the answer."""
    status: int = 200
    streams: bool = False
    """With `stream: true` the answer is a stream of events, or without it where the query's default says so."""
    events: tuple[Any, ...] = ()
    """Types of the events' data."""
    lines: bool = False
    """Its stream is one of JSON lines, which comes unless `stream` is false."""
    own_end: bool = False
    """Its streams do not end with `[DONE]`, and errors in them are among `events`."""
    problems: tuple[int, ...] = ()
    """Error statuses that its siblings do not have."""


class Found(msgspec.Struct, frozen=True):
    """The routes of a path."""

    methods: dict[str, Route]
    tail: str = ""
    values: Mapping[str, str] = {}

    @property
    def any(self) -> Route:
        """One of the routes: scope and error shape are the path's."""
        return next(iter(self.methods.values()))


class Router:
    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[bytes, dict[str, Route]] = {}
        self._tails: dict[bytes, dict[str, Route]] = {}
        self._named: dict[str, dict[str, Route]] = {}
        for route in routes:
            table = self._tails if route.tail else self._exact
            if "{" in route.path:
                self._named.setdefault(route.path, {})[route.method] = route
            else:
                table.setdefault(route.path.encode(), {})[route.method] = route
        self._patterns = [(_pattern(path), methods) for path, methods in self._named.items()]
        self._shaped = {
            path: route.error_shape
            for path, methods in self._exact.items()
            for route in methods.values()
            if route.error_shape != "openai"
        }
        self.open_paths = frozenset(
            path for path, methods in self._exact.items() if all(route.scope == "open" for route in methods.values())
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
        return rest if self.find(rest) is not None else raw_path

    def spelt(self, raw_path: bytes, prefix: str) -> tuple[bytes, Found | None]:
        """The path of a route and the route, also for a path that lacks `prefix` or has it twice: clients add it to
        their base URL, or do not. Any other path stays what it is."""
        wanted, found = prefix.encode(), self.find(raw_path)
        if not wanted or found is not None:
            return raw_path, found
        twice = raw_path.startswith(wanted + wanted + b"/")
        other = raw_path[len(wanted) :] if twice else wanted + raw_path
        found = self.find(other)
        return (raw_path if found is None else other), found

    def find(self, raw_path: bytes) -> Found | None:
        """The routes of a path, for all methods."""
        methods = self._exact.get(raw_path)
        if methods is not None:
            return Found(methods)
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(raw_path)
            if match is not None:
                values = {name: _decoded(value) for name, value in match.groupdict().items()}
                if all(value and value not in (".", "..") and "/" not in value for value in values.values()):
                    return Found(methods, values=values)
        for prefix, methods in self._tails.items():
            if raw_path.startswith(prefix):
                tail = _decoded(raw_path[len(prefix) :])
                if tail and all(part not in ("", ".", "..") for part in tail.split("/")):
                    return Found(methods, tail)
        return None

    def error_shape(self, raw_path: bytes, found: Found | None) -> ErrorShape:
        """Of the errors of a path; a path without a route has the shape of the API below whose path it would be."""
        if found is not None:
            return found.any.error_shape
        return next((shape for path, shape in self._shaped.items() if raw_path.startswith(path + b"/")), "openai")

    def match(self, method: str, raw_path: bytes) -> tuple[Route, Found]:
        """The route, and what of its path was open; see `choose`."""
        return choose(method, self.find(raw_path))


def choose(method: str, found: Found | None) -> tuple[Route, Found]:
    """The route of a method.

    Raises:
        HttpError: 404 unknown path, 405 with `Allow` for the wrong method.
    """
    if found is None:
        raise unknown_url()
    route = found.methods.get("GET" if method == "HEAD" else method)
    if route is None:
        raise method_not_allowed(", ".join(allowed(found.methods)))
    return route, found


def allowed(methods: Iterable[str]) -> list[str]:
    """The value of `Allow`."""
    names = set(methods)
    return sorted(names | {"HEAD"} if "GET" in names else names)


def _pattern(path: str) -> re.Pattern[bytes]:
    parts = _NAME.split(path)
    texts = [
        rf"(?P<{part}>[^/]{{1,{3 * MAX_TAIL}}})" if number % 2 else re.escape(part) for number, part in enumerate(parts)
    ]
    return re.compile("".join(texts).encode())


def _decoded(raw: bytes) -> str:
    return unquote_to_bytes(raw).decode("utf-8", "replace")
