"""GET /openapi.json and /docs: what there is to call, for programs and for people."""

from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Any

import msgspec

from troupellm.server.base.exchange import Exchange
from troupellm.server.base.router import Route
from troupellm.server.openapi.document import document

_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = ((b"content-security-policy", _POLICY), (b"x-content-type-options", b"nosniff"))


class Reference:
    """Describes a finished table of routes, its own two among them. The document is made when it is first asked for."""

    def __init__(self, table: Sequence[Route], *, keys: bool, root_path: str) -> None:
        self._keys = keys
        self._root_path = root_path
        self._made: bytes | None = None
        self.routes = [*table, *self._own()]

    def _own(self) -> list[Route]:
        get = partial(Route, method="GET")
        return [
            get(
                path="/openapi.json",
                handler=self.json,
                summary="This API as an OpenAPI 3.1 document.",
                response=dict[str, Any],
            ),
            get(
                path="/docs",
                handler=self.page,
                scope="open",  # holds nothing secret, and no browser could send the key for it
                summary="The same for people.",
                answers="text/html",
            ),
        ]

    async def json(self, exchange: Exchange, _: None) -> None:
        if self._made is None:
            import troupellm

            made = document(self.routes, version=troupellm.__version__, keys=self._keys, root_path=self._root_path)
            self._made = msgspec.json.encode(made)
        await exchange.respond(200, self._made)

    async def page(self, exchange: Exchange, _: None) -> None:
        page = files("troupellm.server.openapi").joinpath("docs.html").read_bytes()
        await exchange.respond(200, page, _PAGE_HEADERS, content_type=b"text/html; charset=utf-8")
