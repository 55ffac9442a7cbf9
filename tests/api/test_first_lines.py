"""The output of `make serve` for a newcomer, run as it stands: the curl line and the three lines of openai-python."""

import json
import os
import sys
from pathlib import Path

import anyio
import pytest

from troupellm import Engine
from troupellm.server.cli.serve import _announce
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.serving import events_of, running_server, server_config

pytestmark = pytest.mark.anyio

WORDS = """curl() { printf '%s\\0' "$@"; }
"""
"""For a shell, so that it shows what curl would be given."""


@pytest.fixture(params=["builtin", "without a template"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    """A model that chats, and one that only completes."""
    if request.param == "builtin":
        return Engine(**SETTINGS, override_generation_config='{"temperature": 0}')
    folder = write_tiny_model(tmp_path / "tiny")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Engine(str(folder), **SETTINGS)


async def test_the_printed_lines_run_against_the_server_that_printed_them(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine, running_server(engine) as served:
        await _announce(server_config(), engine, served.url)
        told = capsys.readouterr().out
        told, mark, client_lines = told.partition("from openai import OpenAI\n")
        banner, curl, rest = told.partition("curl ")
        assert banner.startswith(f"\nTroupe serves {engine.model_names[0]} at {served.url}\n")

        given = (await anyio.run_process(["sh", "-c", WORDS + curl + rest])).stdout.decode().split("\0")[:-1]
        assert given[0] == "-N"
        assert given[1].startswith(f"{served.url}/v1/")
        options = dict(zip(given[2::2], given[3::2], strict=True))
        assert set(options) == {"-H", "-d"}
        name, value = options["-H"].split(": ")
        async with served.client() as client:
            streamed = await client.post(given[1], content=options["-d"], headers={name: value})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert events_of(streamed.text)[-1]["choices"][0]["finish_reason"] in ("stop", "length")

        assert len(client_lines.split("\n")) == 4, "two lines more, and an empty one"
        done = await anyio.run_process(
            [sys.executable, "-c", mark + client_lines],
            check=False,
            env={**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        )
        assert done.returncode == 0, done.stderr.decode()
        said = done.stdout.decode()
        assert said.endswith("\n")
        if engine.chat_template.available:
            assert said.strip() in banner
            assert "68" in said
