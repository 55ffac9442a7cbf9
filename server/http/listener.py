"""The listening socket: bound before anything is loaded, with a small send buffer so that slow readers are noticed."""

import os
import socket
import stat
from pathlib import Path

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.params.checks import got

MOST_PORT = 65_535


def bind(config: ServerConfig) -> tuple[socket.socket, str]:
    """Bind and listen.

    Returns:
        The socket and the URL that reaches it from this machine.

    Raises:
        OSError: the address is in use or not ours.
    """
    if config.uds is not None:
        return bind_unix(config.uds, config), f"unix:{config.uds}"
    family, kind, protocol, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_buffers(listener, config)
        listener.bind(address)
        listener.listen(config.backlog)
    except BaseException:
        listener.close()
        raise
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if config.ssl_certfile else "http"
    return listener, f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


def bind_unix(path: str, config: ServerConfig) -> socket.socket:
    """Listen at a unix socket that only this user may use.

    Raises:
        OSError: the place is taken, or not ours.
    """
    place = Path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if place.exists() and stat.S_ISSOCK(place.stat().st_mode) and not _answers(path):
            place.unlink()
        _set_buffers(listener, config)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(config.backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def metrics_port(config: ServerConfig) -> int | None:
    """The port that the metrics have for themselves; None where they have none.

    Raises:
        ConfigError: it cannot be one, or is the server's.
    """
    given = config.metrics
    if given in ("open", "key"):
        return None
    port = int(given) if given.isdecimal() and len(given) <= 5 else 0
    if not 0 < port <= MOST_PORT or (port == config.port and config.uds is None):
        text = f"metrics must be open, key or a port in [1, {MOST_PORT}] other than the server's{got(given)}"
        raise ConfigError(text, param="metrics")
    return port


def unlink(config: ServerConfig) -> None:
    """Remove the socket files of a server that ends, unless another one has taken their place already."""
    for path in (config.uds, config.admin_uds):
        if path is not None and not _answers(path):
            Path(path).unlink(missing_ok=True)


def _answers(path: str) -> bool:
    """Whether a server listens there; what a dead one left behind may be replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def _set_buffers(listener: socket.socket, config: ServerConfig) -> None:
    """Options that accepted connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.sse_send_buffer)
    if listener.family != socket.AF_UNIX and config.write_timeout and hasattr(socket, "TCP_USER_TIMEOUT"):
        # Ends a connection whose peer takes nothing, for which a polite close would wait; our own deadline comes first.
        milliseconds = int(2 * config.write_timeout * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
