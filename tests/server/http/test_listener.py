import resource
import socket
import stat
from pathlib import Path

import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.http.connection_limit import MOST, connection_limit, few_descriptors
from troupellm.server.http.listener import bind


def test_free_port_is_taken_and_shown():
    listener, url = bind(ServerConfig(port=0, sse_send_buffer=8192))
    with listener:
        assert url == f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * 8192
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_address_in_use_is_an_os_error():
    listener, _ = bind(ServerConfig(port=0))
    with listener, pytest.raises(OSError, match="in use"):
        bind(ServerConfig(port=listener.getsockname()[1]))


def test_unix_socket_is_private_and_replaces_a_dead_one(tmp_path: Path):
    config = ServerConfig(uds=str(tmp_path / "s"))
    listener, url = bind(config)
    assert url == f"unix:{tmp_path / 's'}"
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    with pytest.raises(OSError, match="in use"):
        bind(config)
    listener.close()
    bind(config)[0].close()


@pytest.mark.parametrize(
    ("descriptors", "limit"),
    [(1_024, 896), (100_000, 65_536), (16_000, 14_000), (64, 24), (4, 2), (resource.RLIM_INFINITY, MOST)],
)
def test_connections_leave_descriptors_for_everything_else(monkeypatch, descriptors, limit):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (descriptors, descriptors))
    assert connection_limit(ServerConfig()) == limit
    assert connection_limit(ServerConfig(max_connections=5)) == 5


@pytest.mark.parametrize(
    ("descriptors", "wanted", "told"),
    [(64, None, True), (64, 20, False), (64, 25, True), (1_024, None, False), (1_024, 900, True)],
)
def test_a_limit_on_descriptors_that_leaves_few_connections_is_told(monkeypatch, descriptors, wanted, told):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (descriptors, descriptors))
    text = few_descriptors(ServerConfig(max_connections=wanted))
    assert (text is not None and f"{descriptors} file descriptors" in text) == told
