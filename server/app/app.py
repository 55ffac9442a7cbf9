"""The ASGI application: gate, router, body, handler, and one place where every error becomes an answer."""

import logging
import os
import re
import secrets
from collections.abc import Container, Mapping, Sequence
from typing import Any

import anyio
import msgspec

from troupellm.actors.engine.engine import Engine
from troupellm.models.worker.memory_use import trim_heap
from troupellm.protocol.api.caller import Caller
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.access.auth import Gate, admin_keys, as_keys
from troupellm.server.access.host_and_origin import Guard, mounted_guard
from troupellm.server.access.keys import read_keys, require_limits
from troupellm.server.app.lifespan import run_lifespan
from troupellm.server.app.routes import METRICS_PATH, PROBES, routes
from troupellm.server.base.body import most_bytes, read_body
from troupellm.server.base.errors import ClientGone, HttpError, answer, clear_locals, flatten, no_websockets
from troupellm.server.base.exchange import Exchange, Receive, Scope, Send, check_size
from troupellm.server.base.json_body import UnknownFields, decode_body
from troupellm.server.base.query import decode_query
from troupellm.server.base.router import Found, Route, Router, RouteScope, choose
from troupellm.server.base.threads import offload
from troupellm.server.base.websocket import refuse_websocket
from troupellm.server.host.internal_requests import is_plain
from troupellm.server.host.server_state import ServerState, stream_defaults
from troupellm.server.observe.logs import log_access
from troupellm.server.observe.metrics import UNMATCHED
from troupellm.server.openapi.routes import Reference
from troupellm.server.page.routes import routes as page_routes
from troupellm.server.responses.socket import ResponsesSocket
from troupellm.server.storage.responses_schema import check_database

logger = logging.getLogger("troupellm.server")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def asgi(
    engine: Engine | str | os.PathLike[str] | None = None,
    *,
    config: ServerConfig | None = None,
    prefix: str = "/v1",
    auth: str | Sequence[str] | None = (),
    **settings: Any,
) -> "App":
    """An ASGI app that serves the OpenAI-compatible API.

    Args:
        engine: an open engine that the caller owns (needs no lifespan, so it mounts anywhere), or the name of a model
            (None: the built-in one) that the app loads at lifespan.startup and closes at lifespan.shutdown.
        prefix: what stands before `/chat/completions` and its siblings.
        auth: a bearer key or several, beside those of `config`; None checks no keys at all, for hosts that do it
            themselves.
        settings: of the engine, when the app owns it; see `EngineConfig`.

    Raises:
        ConfigError: an empty key, a wrong setting or prefix, limits in a key file that the caller's engine does not
            have, or a file for responses that cannot be used.
    """
    if prefix and (prefix[0] != "/" or prefix[-1] == "/"):
        raise ConfigError(f"prefix must be empty, or begin with / and not end with it, got {prefix}", param="prefix")
    config = config or ServerConfig()
    keys = read_keys(msgspec.structs.replace(config, api_key=as_keys(config.api_key) + as_keys(auth)))
    check_database(config.responses_store)
    owned: Engine | None = None
    if engine is None or isinstance(engine, str | os.PathLike):
        host = ServerState(config)
        settings.setdefault("tenants", keys.tenants)
        owned = Engine(engine, progress=host.report, **(stream_defaults(settings) | settings))
    else:
        if unused := next(iter(settings), None):  # ignoring a key, say, would leave everything open
            text = (
                f"unknown setting {unused}: an open engine takes no settings, and keys are given as auth or in config"
            )
            raise ConfigError(text, param=unused)
        require_limits(keys.tenants, engine.config)
        host = ServerState(config, engine)
    return App(host, prefix=prefix, keys=None if auth is None else keys.callers, owned=owned, **admin_access(config))


def admin_access(config: ServerConfig, digests: Mapping[bytes, Caller] | None = None) -> dict[str, Any]:
    """Arguments of `App` for the port that everybody reaches: the admin routes are there only for an admin key.

    Raises:
        ConfigError: an empty key.
    """
    admin = admin_keys(config.admin_api_key) if digests is None else digests
    return {"admin": admin, "scopes": ("open", "api", "admin")} if admin else {}


class App:
    """The callable that an ASGI server runs. Made by `asgi`, or by `serve` for an engine that is still loading."""

    def __init__(
        self,
        host: ServerState,
        *,
        prefix: str = "/v1",
        keys: str | Sequence[str] | Mapping[bytes, Caller] | None = (),
        admin: Mapping[bytes, Caller] | None = None,
        scopes: Container[RouteScope] = ("open", "api"),
        guard: Guard | None = None,
        owned: Engine | None = None,
    ) -> None:
        """
        Args:
            keys: of the API; none opens it.
            admin: of the admin routes, as digests; None opens them, where `scopes` has them.
            scopes: which routes exist.
            guard: the check before all others; None is the guard of an app inside another server.
        """
        self.host = host
        self._config = host.config
        page = page_routes(host, mounted=guard is None, guarded=bool(admin))
        shown = {route.path for route in page}
        every = [*page, *(route for route in routes(host, prefix) if route.path not in shown)]
        table = [route for route in every if route.scope in scopes]
        self.routes = Reference(table, keys=bool(keys), root_path=host.config.root_path).routes
        self._router = Router(self.routes)
        self._prefix = prefix
        host.batches.endpoints = frozenset(route.path for route in table if is_plain(route))
        self._gates = {"api": Gate(keys, self._router.open_paths), "admin": Gate(admin, frozenset())}
        self.owners: Mapping[str, str] = self._gates["api"].owners
        """Of what outlives a request, and the names that they have now."""
        self._guard = guard or mounted_guard(host.config)
        self._unknown = UnknownFields()
        self._owned = owned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await run_lifespan(self.host, self._owned, self.routes, self.owners, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responses are made over WebSockets too; any other handshake is refused."""
        asked: dict[str, Any] = {**scope, "method": "GET"}
        first = Exchange(asked, receive, send, request_id=self._request_id(scope), write_timeout=0.0)
        first.raw_path, found = self._located(first, scope)
        await receive()
        try:
            if first.raw_path != f"{self._prefix}/responses".encode():
                raise no_websockets()
            self._guard.check(first, own_pages_only=True)
            check_size(first)
            self._check_key(first, found)
            self.host.require()
        except HttpError as error:
            status = await refuse_websocket(scope, receive, send, error, request_id=first.request_id)
            self.host.counts.count("GET", UNMATCHED, status)
            self.host.on_change()
            return

        def exchange(receive: Receive, send: Send) -> Exchange:
            timeout, name = self._config.write_timeout, secrets.token_hex(16)
            made = Exchange({**asked, "method": "POST"}, receive, send, request_id=name, write_timeout=timeout)
            made.raw_path, made.route, made.caller = first.raw_path, first.raw_path.decode(), first.caller
            made.error_shape = "responses"
            return made

        def answered(made: Exchange) -> None:
            self.host.answered(made)
            if not self._config.disable_access_log:
                log_access(made)

        await send({"type": "websocket.accept"})
        await ResponsesSocket(self.host, first.caller, receive, send, exchange, answered).run()

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Nothing but cancellation leaves this method."""
        exchange = Exchange(
            scope, receive, send, request_id=self._request_id(scope), write_timeout=self._config.write_timeout
        )
        exchange.raw_path, found = self._located(exchange, scope)
        probe = exchange.raw_path in self._router.open_paths
        try:
            with exchange.cancel_scope:
                await self._answer(exchange, found, probe=probe)
                if self.host.bodies.take_trim():
                    await offload(trim_heap)
        except (Exception, BaseExceptionGroup) as error:
            logger.error("request %s could not be answered", exchange.request_id, exc_info=error)
        finally:
            self.host.answered(exchange)
            quiet = probe or (exchange.raw_path == METRICS_PATH and exchange.status == 200)
            if not quiet and not self._config.disable_access_log:
                log_access(exchange)

    async def _answer(self, exchange: Exchange, found: Found | None, *, probe: bool) -> None:
        try:
            exchange.error_shape = self._router.error_shape(exchange.raw_path, found)
            exchange.further_headers = self._guard.check(exchange, probe=exchange.raw_path in PROBES)
            check_size(exchange)
            preflight = self._guard.preflight(exchange)
            if preflight is not None:
                await exchange.respond(204, b"", preflight)
                return
            self._check_key(exchange, found)
            route, found = choose(exchange.method, found)
            exchange.route, exchange.tail, exchange.path_values = route.path, found.tail, found.values
            if route.query is not None:
                exchange.query = decode_query(exchange.raw_query, route.query)
            if probe:
                await route.handler(exchange, None)
                return
            await self._handle(exchange, route)
        except (Exception, BaseExceptionGroup) as error:
            await self._fail(exchange, flatten(error))
            clear_locals(error)
        finally:
            self.host.leave(exchange)

    def _check_key(self, exchange: Exchange, found: Found | None) -> None:
        gate = self._gates["admin" if found is not None and found.any.scope == "admin" else "api"]
        exchange.caller = gate.check(
            exchange.raw_path, exchange.header_values(b"authorization"), exchange.header_values(b"x-api-key")
        )

    async def _handle(self, exchange: Exchange, route: Route) -> None:
        """Read the body, then run the handler for as long as the client stays."""
        if route.body is None:
            await route.handler(exchange, None)
            return
        self.host.enter(exchange)
        self.host.require()
        limit, timeout = self._config.max_body_bytes, self._config.body_timeout
        with self.host.bodies.reserving(exchange.key, most_bytes(exchange, limit)) as reservation:
            exchange.room = reservation
            raw = b""
            with exchange.reading:
                raw = await read_body(exchange, limit=limit, timeout=timeout, reservation=reservation)
            self.host.require()
            body = await decode_body(
                raw, route.body, self._unknown, limiter=self.host.decodes, reservation=reservation, timeout=timeout
            )
            raw = b""  # its memory is free while the request is answered
            await self._run(exchange, route, body)

    async def _run(self, exchange: Exchange, route: Route, body: msgspec.Struct) -> None:
        failure: Exception | BaseExceptionGroup[BaseException] | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.watch, group.cancel_scope)
            try:
                await route.handler(exchange, body)
            except (Exception, BaseExceptionGroup) as error:
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _fail(self, exchange: Exchange, error: BaseException) -> None:
        if exchange.gone or isinstance(error, ClientGone):
            return
        starting = isinstance(error, HttpError) and error.status == 503
        extra = self.host.progress_fields() if starting else None
        try:
            error_answer = answer(
                error,
                shape=exchange.error_shape,
                renames=exchange.renames,
                extra=extra,
                overload_status=503 if self._config.overload_status == 503 else None,
            )
            await exchange.respond_error(error_answer)
        except ClientGone:
            return

    def _located(self, exchange: Exchange, scope: Scope) -> tuple[bytes, Found | None]:
        """The path as its route is named, and the route, where there is one."""
        return self._router.spelt(self._router.below(exchange.raw_path, scope.get("root_path", "")), self._prefix)

    def _request_id(self, scope: Scope) -> str:
        """The client's own id where it is short and plain, else a new one."""
        if self._config.enable_request_id_headers:
            for name, value in scope["headers"]:
                if name.lower() == b"x-request-id":
                    given = value.decode("latin-1")
                    if _REQUEST_ID.fullmatch(given):
                        return str(given)
        return secrets.token_hex(16)
