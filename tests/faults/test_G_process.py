"""Rows G5 and G9 of the fault table: what a server process opens, and where its secrets are not.

All of it is slow: `make test` has a server in the test's own process, in `test_G_secrets`.
"""

import os
import signal
import stat
from pathlib import Path

import httpx
import psutil
import pytest

from troupellm.tests.support.servers.processes import ready_process

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

KEY, BOSS, NAMED = "sk-very-secret-key-1", "sk-very-secret-boss-2", "sk-very-secret-named-3"


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=["one", "fronts"])
async def test_G5_one_port_and_sockets_for_this_user_only(checkpoint, tmp_path, flags):
    place = tmp_path / "admin.sock"
    shared = set(os.listdir("/dev/shm"))
    async with ready_process(checkpoint, "--admin-uds", str(place), *flags, spare=True) as server:
        members = family(server.pid)
        listening = {
            connection.laddr.port
            for process in members
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {server.port}
        udp = [one for process in members for one in process.net_connections("udp")]
        assert not udp
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        paths = {one.laddr for process in members for one in process.net_connections("unix") if one.laddr}
        assert paths <= {str(place)}, paths
        assert set(os.listdir("/dev/shm")) <= shared
        transport = httpx.AsyncHTTPTransport(uds=str(place))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/server_info")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 404, "the API is not served there"
        async with server.client() as client:
            assert (await client.get("/server_info")).status_code == 404, "nor these at the port"
        server.signal(signal.SIGTERM)
        assert await server.exit_code(20) == 0
    assert not place.exists()


@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=["one", "fronts"])
async def test_G9_keys_are_in_no_arguments_log_metrics_or_answers(checkpoint, tmp_path, flags):
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "alice"\nkey = "{NAMED}"\n')
    environment = {"TROUPE_API_KEY": KEY, "TROUPE_ADMIN_API_KEY": BOSS}
    keys = ("--api-key-file", str(file))
    async with ready_process(checkpoint, *keys, *flags, environment=environment, spare=True) as server:
        seen = ""
        for process in family(server.pid):
            seen += " ".join(process.cmdline())
            if process.pid != server.pid:  # the environment of its own process is where they were put
                seen += Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
        async with server.client(key=NAMED) as client:
            for path in ("/metrics", "/version", "/openapi.json", "/v1/models"):
                seen += (await client.get(path)).text
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            seen += (await client.post("/v1/completions", json=body)).text
            seen += str(
                (await client.post("/v1/completions", json=body, headers={"authorization": "Bearer x"})).headers
            )
        async with server.client(key=BOSS) as client:
            for path in ("/server_info", "/debug/snapshot"):
                answer = await client.get(path)
                assert answer.status_code == 200
                seen += answer.text
        seen += "\n".join(server.log)
    assert "alice" in seen
    for secret in (KEY, BOSS, NAMED):
        assert secret not in seen, [line[:200] for line in seen.splitlines() if secret in line]
