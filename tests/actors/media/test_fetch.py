"""Fetching images: nothing but a public address of an allowed host is ever dialled."""

import socket
import threading

import anyio
import httpcore
import pytest

from troupellm.actors.media.addresses import is_public
from troupellm.actors.media.fetch import Fetcher
from troupellm.protocol.config.media import MediaConfig
from troupellm.protocol.errors import InvalidRequest

pytestmark = pytest.mark.anyio

PRIVATE_HOSTS = (
    "127.0.0.1", "127.0.0.2", "127.1", "127.0.1", "127.255.255.254", "2130706433", "0x7f000001", "0x7f.0.0.1",
    "0177.0.0.1", "017700000001", "0x7f.1", "0", "0.0.0.0", "localhost", "localhost.", "LOCALHOST",
    "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.0.1", "192.168.255.255", "0xa000001",
    "167772161", "169.254.169.254", "169.254.0.1", "0xa9fea9fe", "2852039166", "100.64.0.1", "100.127.255.255",
    "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.250",
    "240.0.0.1", "255.255.255.255", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[::ffff:10.0.0.1]", "[::ffff:169.254.169.254]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b::a00:1]",
    "[64:ff9b:1::a00:1]", "[2002:7f00:1::]", "[2002:a00:1::1]", "[fe80::1]", "[fc00::1]", "[fd12:3456:789a::1]",
    "[ff02::1]", "[2001:db8::1]", "[2001:0:7f00:1::]", "[::ffff:0:127.0.0.1]", "[100::1]", "[fec0::1]",
)  # fmt: skip
"""Spellings of addresses that clients must not reach through the server."""
BAD_URLS = (
    "ftp://host.example/a.png", "file:///etc/passwd", "gopher://host.example/", "unix:///run/x", "host.example/a.png",
    "//host.example/a", "http:///a", "http://", "http://user:pw@host.example/", "http://user@127.0.0.1/",
    "http://host.example:99999/", "http://host.example:x/", "http://host.example\\@127.0.0.1/", "http://ho st.example/",
    "http://host.example/\r\nHost: x", "http://[::1", "javascript:alert(1)", "http://host.example/" + "a" * 9000,
    "http://\uff11\uff12\uff17.0.0.1/",
)  # fmt: skip


class Loopback(httpcore.AsyncNetworkBackend):
    """Stands for the internet: dials one server of this machine for every host."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        return await self._backend.connect_tcp("127.0.0.1", self._port, timeout)


@pytest.fixture
def listener():
    """A socket on all of this machine's addresses, which counts connections."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128) as server:
        server.setblocking(False)
        yield server


def connections(server: socket.socket) -> int:
    found = 0
    while True:
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return found
        found += 1


@pytest.fixture
def answering():
    """Makes a server that gives each connection one of the answers, in order."""
    servers = []

    def make(*answers: bytes) -> Loopback:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve() -> None:
            for answer in answers:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(65536)
                    peer.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return Loopback(server.getsockname()[1])

    yield make
    for server in servers:
        server.close()


async def refusal(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await fetcher.fetch(url, "messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"
    return caught.value.message


async def test_no_spelling_of_an_address_that_is_not_public_is_dialled(listener):
    fetcher = Fetcher(MediaConfig(allowed_media_domains=("*",), media_timeout=5.0))
    port = listener.getsockname()[1]
    for host in PRIVATE_HOSTS:
        for scheme in ("http", "https"):
            await refusal(fetcher, f"{scheme}://{host}:{port}/a.png")
    assert connections(listener) == 0
    assert len(PRIVATE_HOSTS) >= 60


@pytest.mark.parametrize("url", BAD_URLS)
async def test_a_url_that_is_not_plain_http_is_refused_before_a_name_is_resolved(url, listener):
    fetcher = Fetcher(MediaConfig(allowed_media_domains=("*",), media_timeout=5.0))
    assert "URL" in await refusal(fetcher, url)
    assert connections(listener) == 0


async def test_no_host_is_allowed_by_default():
    assert "allowed_media_domains" in await refusal(Fetcher(MediaConfig()), "https://host.example/a.png")


@pytest.mark.parametrize(
    ("allowed", "host", "taken"),
    [
        ("a.example", "a.example", True),
        ("a.example", "A.EXAMPLE.", True),
        ("a.example", "b.a.example", False),
        ("*.a.example", "b.a.example", True),
        ("*.a.example", "a.example", False),
        ("*.a.example", "evila.example", False),
        ("a.example", "a.example.evil.example", False),
    ],
)
def test_a_domain_allows_its_own_hosts_alone(allowed, host, taken):
    assert MediaConfig(allowed_media_domains=(allowed,)).allows(host) is taken


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


async def test_an_image_of_an_allowed_host_arrives_whole(answering):
    network = answering(response(b"picture", "Content-Type: image/png", "Content-Length: 7"))
    fetcher = Fetcher(MediaConfig(allowed_media_domains=("host.example",)), network)
    assert await fetcher.fetch("http://host.example/a.png", "x") == b"picture"


REDIRECT = "302 Found"
AGAIN = response(b"", "Location: /again", "Content-Length: 0", "Connection: close", status=REDIRECT)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([response(b"", "Location: file:///etc/passwd", status=REDIRECT)], "must begin with http"),
        ([response(b"", "Location: http://other.example/", status=REDIRECT)], "allowed_media_domains"),
        ([response(b"", "Location: //127.0.0.1/", status=REDIRECT)], "allowed_media_domains"),
        ([response(b"", "Location: //[", status=REDIRECT)], "cannot be read"),
        ([AGAIN] * 5, "more than 3"),
        ([response(b"", status="404 Not Found")], "answers 404"),
        ([response(b"x", "Content-Length: 10000000000")], "more than 1000 bytes"),
        ([response(b"x" * 2000)], "more than 1000 bytes"),
        ([response(b"x", "Content-Encoding: gzip", "Content-Length: 1")], "compressed"),
        ([response(b"<html>", "Content-Type: text/html", "Content-Length: 6")], "no image"),
        ([b"SSH-2.0-OpenSSH_9\r\n"], "protocol"),
    ],
)  # fmt: skip
async def test_an_answer_that_is_no_image_of_the_allowed_size_is_refused(answers, reason, answering):
    config = MediaConfig(allowed_media_domains=("host.example",), max_media_bytes=1000)
    assert reason in await refusal(Fetcher(config, answering(*answers)), "http://host.example/a.png")


async def test_a_server_that_sends_nothing_costs_no_more_than_the_timeout(listener):
    config = MediaConfig(allowed_media_domains=("host.example",), media_timeout=0.05)
    network = Loopback(listener.getsockname()[1])
    with anyio.fail_after(5.0):
        assert "longer than 0.05 s" in await refusal(Fetcher(config, network), "http://host.example/a.png")


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111"])
def test_an_address_of_the_internet_is_public(address):
    assert is_public(address)
