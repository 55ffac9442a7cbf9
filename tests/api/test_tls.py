"""HTTPS, HTTP/2 over it, and certificates of clients."""

import contextlib
import json
import socket
import ssl

import anyio
import h2.connection
import h2.events
import pytest

from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.http.server import tls_context
from troupellm.server.serve.run import serve
from troupellm.tests.support.servers.certificates import write_certificates
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio


@pytest.fixture
def files(tmp_path):
    return write_certificates(tmp_path)


def trusting(files, **more) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files["ca"])
    if more.get("certificate"):
        context.load_cert_chain(files["client"], files["client_key"])
    context.set_alpn_protocols(more.get("protocols", ["http/1.1"]))
    return context


async def ask(port: int, context: ssl.SSLContext) -> bytes:
    stream = await anyio.connect_tcp("127.0.0.1", port, ssl_context=context, tls_hostname="localhost")
    async with stream:
        await stream.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        seen = b""
        try:
            while True:
                seen += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return seen


async def test_https_answers_those_who_trust_it_and_no_plain_text(tiny_engine, files):
    config = server_config(ssl_certfile=files["server"], ssl_keyfile=files["server_key"])
    async with tiny_engine() as engine, running_server(engine, config) as served:
        assert served.url.startswith("https://")
        assert b"200" in (await ask(served.port, trusting(files))).split(b"\r\n")[0]
        with pytest.raises(ssl.SSLError):
            await ask(served.port, ssl.create_default_context())
        plain = await served.raw(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" not in await plain.read_all()
        await plain.close()


async def test_http2_is_agreed_on_over_tls(tiny_engine, files):
    config = server_config(ssl_certfile=files["server"], ssl_keyfile=files["server_key"])
    async with tiny_engine() as engine, running_server(engine, config) as served:
        context = trusting(files, protocols=["h2"])
        stream = await anyio.connect_tcp("127.0.0.1", served.port, ssl_context=context, tls_hostname="localhost")
        async with stream:
            client = h2.connection.H2Connection()
            client.initiate_connection()
            client.send_headers(
                1,
                [(":method", "GET"), (":path", "/v1/models"), (":scheme", "https"), (":authority", "localhost")],
                True,
            )
            await stream.send(client.data_to_send())
            body, ended = b"", False
            with anyio.fail_after(20):
                while not ended:
                    for event in client.receive_data(await stream.receive()):
                        body += event.data if isinstance(event, h2.events.DataReceived) else b""
                        ended = ended or isinstance(event, h2.events.StreamEnded)
        assert json.loads(body)["object"] == "list"


async def test_with_authorities_clients_must_show_a_certificate(tiny_engine, files):
    config = server_config(ssl_certfile=files["server"], ssl_keyfile=files["server_key"], ssl_ca_certs=files["ca"])
    async with tiny_engine() as engine, running_server(engine, config) as served:
        assert b" 200 " in (await ask(served.port, trusting(files, certificate=True))).split(b"\r\n")[0]
        refused = b""
        with contextlib.suppress(ssl.SSLError, anyio.BrokenResourceError):
            refused = await ask(served.port, trusting(files))
        assert refused == b""


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"ssl_keyfile": "key"}, "ssl_certfile"),
        ({"ssl_certfile": "nowhere.pem"}, "ssl_certfile"),
        ({"ssl_certfile": __file__}, "ssl_certfile"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "allow_credentials"),
    ],
)
async def test_wrong_settings_are_refused_before_anything_is_bound(settings, param):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as caught:
        await serve(EngineConfig(), ServerConfig(port=taken.getsockname()[1], **settings))
    assert caught.value.param == param


def test_an_authority_that_is_none_is_refused(files):
    with pytest.raises(ConfigError) as caught:
        tls_context(ServerConfig(ssl_certfile=files["server"], ssl_keyfile=files["server_key"], ssl_ca_certs=__file__))
    assert caught.value.param == "ssl_ca_certs"
