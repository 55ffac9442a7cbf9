"""HTTPS from a server of several processes, and a unix socket in its stead."""

import ssl
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

from troupellm.tests.support.servers.certificates import write_certificates
from troupellm.tests.support.servers.processes import serving_process

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]


@asynccontextmanager
async def until_ready(client: httpx.AsyncClient):
    with anyio.fail_after(60):
        while True:
            try:
                if (await client.get("/readyz")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await anyio.sleep(0.1)
    yield


@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=["one", "fronts"])
async def test_a_process_with_a_certificate_serves_https(checkpoint, tmp_path, flags):
    files = write_certificates(tmp_path)
    tls = ("--ssl-certfile", files["server"], "--ssl-keyfile", files["server_key"])
    async with serving_process(checkpoint, *tls, *flags) as server:
        with anyio.fail_after(60):
            while not server.logged("listening at https://"):  # noqa: ASYNC110 - another process's state
                await anyio.sleep(0.05)
        port = server.logged("listening at https://")[0].partition("https://127.0.0.1:")[2].partition(",")[0]
        context = ssl.create_default_context(cafile=files["ca"])
        url = f"https://localhost:{port}"
        async with httpx.AsyncClient(base_url=url, verify=context, trust_env=False) as client, until_ready(client):
            body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            streamed = await client.post("/v1/completions", json=body | {"stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(base_url=url, trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get("/readyz")


@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=["one", "fronts"])
async def test_a_process_answers_on_a_unix_socket(checkpoint, tmp_path, flags):
    place = str(tmp_path / "http.sock")
    async with serving_process(checkpoint, "--uds", place, *flags):
        transport = httpx.AsyncHTTPTransport(uds=place)
        async with httpx.AsyncClient(base_url="http://anything", transport=transport) as client, until_ready(client):
            body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
