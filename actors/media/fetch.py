"""Fetches images by http and https, safe by default: only from hosts that are allowed, and from public addresses.

A name is resolved once, all its addresses must be public, and one of those addresses is dialled: a name that changes
between the check and the connection changes nothing. Host, SNI and the certificate's check keep the name. Each redirect
is checked like the first address. No proxy, cookie or credential is used. Compressed bodies are not asked for and not
taken.
"""

import ssl
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from socket import SOCK_STREAM
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import anyio
import httpcore

from troupellm.actors.media.addresses import is_public
from troupellm.protocol.config.media import MediaConfig
from troupellm.protocol.errors import InvalidRequest

MOST_REDIRECTS = 3
MOST_URL = 8192
"""Characters."""
UNAVAILABLE = "media_unavailable"
_PORTS = {"http": 80, "https": 443}
_MOVED = (301, 302, 303, 307, 308)
_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")
_HEADERS = ((b"Accept", b"image/*"), (b"Accept-Encoding", b"identity"), (b"User-Agent", b"troupellm"))


class Unavailable(Exception):
    """An image cannot be had; the text is fit for clients, and says nothing of networks that they cannot see."""


class PublicNetwork(httpcore.AsyncNetworkBackend):
    """Connects to public addresses alone."""

    def __init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises Unavailable: an address of the host is not public, or none can be reached."""
        with suppress(OSError, UnicodeError):
            found = await anyio.getaddrinfo(host, port, type=SOCK_STREAM)
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
            if not all(is_public(address) for address in addresses):
                raise Unavailable("its host has an address that is not public")
            for address in addresses:
                with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                    return await self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
        raise Unavailable("its host cannot be reached")


class Fetcher:
    """Fetches one image at a time; its calls share nothing but settings."""

    def __init__(self, config: MediaConfig, network: httpcore.AsyncNetworkBackend | None = None) -> None:
        """network: by default the public one."""
        self._config = config
        self._network = network or PublicNetwork()

    async def fetch(self, url: str, field: str) -> bytes:
        """The bytes at a URL.

        Raises:
            InvalidRequest: the URL is not allowed, or its image cannot be had; names `field`.
        """
        try:
            with anyio.fail_after(self._config.media_timeout):
                return await self._fetch(url)
        except TimeoutError:
            reason = f"it takes longer than {self._config.media_timeout:g} s"
        except (Unavailable, httpcore.ProtocolError) as error:
            reason = str(error) if isinstance(error, Unavailable) else "its server breaks the protocol"
        except (httpcore.NetworkError, httpcore.TimeoutException, OSError, ssl.SSLError):
            reason = "its server cannot be reached, or its certificate is not valid"
        raise InvalidRequest(f"{field}: the image cannot be fetched: {reason}", param=field, code=UNAVAILABLE)

    async def _fetch(self, url: str) -> bytes:
        async with httpcore.AsyncConnectionPool(
            ssl_context=_tls(), max_connections=1, http1=True, http2=False, network_backend=self._network
        ) as pool:
            for _ in range(1 + MOST_REDIRECTS):
                self._check(url)
                async with pool.stream("GET", url, headers=_HEADERS) as response:
                    if response.status not in _MOVED:
                        return await self._body(response)
                    url = _joined(url, _header(response, b"location").decode("latin-1"))
        raise Unavailable(f"it redirects more than {MOST_REDIRECTS} times")

    def _check(self, url: str) -> SplitResult:
        """Raises Unavailable where a URL is not allowed."""
        if len(url) > MOST_URL or not url.isascii() or any(letter <= " " or letter == "\\" for letter in url):
            raise Unavailable("its URL has a letter that URLs may not have, or is too long")
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError:
            raise Unavailable("its URL cannot be read") from None
        if parts.scheme not in _PORTS or not host:
            raise Unavailable("its URL must begin with http:// or https:// and a host")
        if "@" in parts.netloc:
            raise Unavailable("its URL must have no credentials")
        if not self._config.allows(host):
            raise Unavailable("its host is not among the hosts that allowed_media_domains names")
        return parts

    async def _body(self, response: httpcore.Response) -> bytes:
        most = self._config.max_media_bytes
        if response.status != 200:
            raise Unavailable(f"its server answers {response.status}")
        if _header(response, b"content-encoding").lower() not in (b"", b"identity"):
            raise Unavailable("its server sends it compressed")
        kind = _header(response, b"content-type").decode("latin-1").strip().lower()
        if kind and not kind.startswith(_TYPES):
            raise Unavailable("its server says that it is no image")
        length = _header(response, b"content-length")
        if length.isdigit() and int(length) > most:
            raise Unavailable(f"it has more than {most} bytes")
        body = bytearray()
        async for piece in response.aiter_stream():
            body += piece
            if len(body) > most:
                raise Unavailable(f"it has more than {most} bytes")
        return bytes(body)


def _joined(url: str, location: str) -> str:
    """Where a redirect leads. Raises Unavailable."""
    try:
        return urljoin(url, location)
    except ValueError:
        raise Unavailable("it redirects to a URL that cannot be read") from None


@lru_cache(1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _header(response: httpcore.Response, name: bytes) -> bytes:
    return next((value for key, value in response.headers if key.lower() == name), b"")
