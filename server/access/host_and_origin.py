"""Checks before keys: the server's own host names, and the web pages that may use it.

A web page in a browser can send requests to every host that the browser reaches, also to a server that
listens on loopback only, under any name that resolves there.
"""

import ipaddress
import re
from collections.abc import Iterable

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.base.errors import Headers, ambiguous_head, misdirected, origin_not_allowed
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.skipped import HEADER as SKIPPED

ANY = "*"
PREFLIGHT_SECONDS = b"600"
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{1,5})?")
_EXPOSED = (
    b"access-control-expose-headers",
    b", ".join((b"x-request-id", b"request-id", b"retry-after", b"retry-after-ms", b"x-should-retry", SKIPPED)),
)
_ONCE = (b"host", b"origin", b"content-type", b"content-length")


class Guard:
    def __init__(self, config: ServerConfig, *, hosts: Iterable[str] | None, own_pages_only: bool) -> None:
        """
        Args:
            hosts: names that requests may be for; None takes any.
            own_pages_only: refuse pages of other origins than `config.allowed_origins` and the server's own; else it
                is left to the server in front.

        Raises:
            ConfigError: cookies for pages of any origin.
        """
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
        self._own_pages_only = own_pages_only or bool(self._origins)
        self._credentials = config.allow_credentials
        if self._credentials and ANY in self._origins:
            raise ConfigError("allow_credentials needs allowed_origins by name, not *", param="allow_credentials")
        self._preflight: Headers = (
            (b"access-control-allow-methods", ", ".join(config.allowed_methods).encode()),
            (b"access-control-allow-headers", ", ".join(config.allowed_headers).encode()),
            (b"access-control-max-age", PREFLIGHT_SECONDS),
        )

    def check(self, exchange: Exchange, *, probe: bool = False, own_pages_only: bool = False) -> Headers:
        """Let a request pass, or refuse it.

        Args:
            probe: any host is taken: balancers probe a server by its address.
            own_pages_only: refuse pages of other origins also where requests of all pages pass. Browsers let every page
                open a WebSocket without asking the server first.

        Returns:
            what its answer must tell the browser.

        Raises:
            HttpError: 400 a header twice, 421 another host, 403 a page that may not.
        """
        for name in _ONCE:
            if len(exchange.header_values(name)) > 1:
                raise ambiguous_head(name.decode())
        named = exchange.header(b"host") if exchange.authority is None else exchange.authority
        host = (named or "").lower()
        if named is not None and not probe and not self._goes_by(host):  # HTTP/1.0 may name none
            raise misdirected()
        origin = exchange.header(b"origin")
        if origin is None or not (self._own_pages_only or own_pages_only):
            return ()
        return self._answer_to(origin.lower(), host)

    def _goes_by(self, host: str) -> bool:
        return self._hosts is None or ANY in self._hosts or _name_of(host) in self._hosts

    def preflight(self, exchange: Exchange) -> Headers | None:
        """The headers that answer a browser's preflight request; None for another request."""
        asks = exchange.method == "OPTIONS" and exchange.header(b"access-control-request-method") is not None
        return self._preflight if asks and self._origins and exchange.header(b"origin") is not None else None

    def _answer_to(self, origin: str, host: str) -> Headers:
        if ANY in self._origins:
            return ((b"access-control-allow-origin", b"*"), _EXPOSED)
        if origin in self._origins:
            headers: Headers = (
                (b"access-control-allow-origin", origin.encode("latin-1")),
                _EXPOSED,
                (b"vary", b"origin"),
            )
            return (*headers, (b"access-control-allow-credentials", b"true")) if self._credentials else headers
        if host and origin.partition("://")[2] == host:
            return ()
        raise origin_not_allowed()


def guard_of(config: ServerConfig) -> Guard:
    """For a server of our own.

    Raises:
        ConfigError: see `Guard`.
    """
    hosts: Iterable[str] | None = {*config.allowed_hosts, *_LOCAL} if config.allowed_hosts else None
    if hosts is None and config.uds is None and is_loopback(config.host):
        hosts = {*_LOCAL, config.host}
    return Guard(config, hosts=hosts, own_pages_only=True)


def mounted_guard(config: ServerConfig) -> Guard:
    """For an app inside another server, which knows its own names: only configured checks apply."""
    return Guard(config, hosts=config.allowed_hosts or None, own_pages_only=False)


def is_loopback(host: str) -> bool:
    """Whether an address or a name is this machine's alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _name_of(host: str) -> str | None:
    """`name`, `name:port`, `[::1]:port` without the port and the brackets; None for what is none of them."""
    match = _HOST.fullmatch(host)
    return None if match is None else (match["address"] or match["name"]).rstrip(".")
