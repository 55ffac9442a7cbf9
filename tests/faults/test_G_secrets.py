"""Rows G5 and G9 of the fault table on a server in this process; `test_G_process` has whole process trees."""

import logging
from pathlib import Path
from typing import Any

import psutil
import pytest

from troupellm.server.access.keys import read_keys
from troupellm.server.openai import tokenize
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

KEY, BOSS, NAMED = "sk-very-secret-key-1", "sk-very-secret-boss-2", "sk-very-secret-named-3"


def opened() -> tuple[set[int], set[str]]:
    """Ports that this process listens at, UDP's too, and names of its unix sockets."""
    process = psutil.Process()
    ports = {
        one.laddr.port
        for one in process.net_connections("inet")
        if one.laddr and one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }
    return ports, {one.laddr for one in process.net_connections("unix") if one.laddr}


async def test_G5_a_server_listens_at_one_port_and_nowhere_else(tiny_engine):
    ports, names = opened()
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        now = opened()
    assert now[0] - ports == {served.port}
    assert now[1] <= names


async def test_G9_keys_are_in_no_answer_and_no_line_of_the_log_nor_in_that_of_a_crash(
    tiny_engine, tmp_path: Path, caplog, monkeypatch
):
    async def crash(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(tokenize, "tokenize", crash)
    caplog.set_level(logging.DEBUG, logger="troupellm")
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "alice"\nkey = "{NAMED}"\n')
    config = server_config(api_key=(KEY,), admin_api_key=(BOSS,), api_key_file=str(file))
    seen = ""
    async with tiny_engine(tenants=read_keys(config).tenants) as engine, running_server(engine, config) as served:
        for key in (KEY, NAMED, BOSS, f"{KEY}x"):
            async with served.client(key=key) as client:
                for path in ("/metrics", "/openapi.json", "/v1/models", "/server_info", "/debug/snapshot"):
                    answer = await client.get(path)
                    seen += f"{answer.headers}{answer.text}"
                for path in ("/v1/completions", "/tokenize", "/v1/messages"):
                    answer = await client.post(path, json={"model": "tiny", "prompt": "x", "max_tokens": 1})
                    seen += f"{answer.headers}{answer.text}"
    assert "injected" in caplog.text
    assert "injected" not in seen
    assert "alice" in seen
    seen += caplog.text
    for secret in (KEY, BOSS, NAMED):
        assert secret not in seen, [line[:200] for line in seen.splitlines() if secret in line]
