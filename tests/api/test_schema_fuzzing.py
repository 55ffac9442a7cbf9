"""The promises of /openapi.json, against the server: no 5xx, every error in our shape, only documented statuses.

Schemathesis makes requests that the document allows and requests that it forbids, for every route.
"""

import re

import pytest

from troupellm.tests.support.clients.fuzzing import fuzz
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio


def generated(run) -> int:
    return int(re.search(r"(\d+) generated", run["output"])[1])


async def test_a_few_requests_of_every_kind(tiny_engine, tmp_path):
    """The sample of `make test`."""
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        run = await fuzz(client, tmp_path, "--phases", "fuzzing", "-n", "2")
    assert generated(run) > 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_every_route_within_and_beyond_its_schema(tiny_engine, tmp_path):
    config = server_config(files_dir=str(tmp_path / "files"))
    async with tiny_engine() as engine, running_server(engine, config) as served, served.client() as client:
        run = await fuzz(client, tmp_path, "--phases", "examples,coverage,fuzzing", "-n", "60")
    assert generated(run) > 5_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", ["boss", "secret"])
async def test_fuzzed_admin_requests_cause_no_server_error(tiny_engine, tmp_path, key):
    """Those that put the engine to rest are among them: all the others must say so, and none fail."""
    config = server_config(api_key=("secret",), admin_api_key=("boss",))
    async with tiny_engine() as engine, running_server(engine, config) as served:
        admin = tuple(route.path for route in served.app.routes if route.scope == "admin")
        assert admin
        async with served.client(key="secret") as client:
            await fuzz(client, tmp_path, "--phases", "coverage,fuzzing", "-n", "20", only=admin, key=key)
        async with served.client(key="boss") as client:
            await client.post("/wake_up")
            await client.post("/resume")
        async with served.client(key="secret") as client:
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 1})
            assert answer.status_code == 200
