"""The README's programs run as they stand; only the server's address and the engine's size are replaced."""

import re
import shlex
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm import Engine
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.serving import events_of, running_server

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def program_with(text: str) -> str:
    """The one Python example that has it."""
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if text in block]
    return str(found)


def test_the_embedding_program_answers_and_streams(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ", ".join(f"{name}={value!r}" for name, value in SETTINGS.items())
    program = program_with("troupellm.Engine()").replace("troupellm.Engine()", f"troupellm.Engine({settings})")
    exec(compile(program, "README.md", "exec"), {})
    answer, _, rest = capsys.readouterr().out.partition("Usage(")
    usage, _, story = rest.partition("\n")
    assert answer.strip()
    assert "prompt_tokens=" in usage
    assert story.strip()


@pytest.mark.anyio
async def test_examples_that_ask_the_server_are_answered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    program = program_with("OpenAI(")
    (curl,) = re.findall(r"```\n(curl .*?)```", README, re.DOTALL)
    assert ADDRESS in program
    assert ADDRESS in curl
    engine = Engine(**SETTINGS, override_generation_config='{"temperature": 0}')
    async with engine, running_server(engine) as served:
        names: dict[str, Any] = {}
        code = compile(program.replace(ADDRESS, served.url), "README.md", "exec")
        await anyio.to_thread.run_sync(exec, code, names)
        names["client"].close()
        assert "68" in capsys.readouterr().out

        words = shlex.split(curl.replace("\\\n", " ").replace(ADDRESS, served.url))
        assert words[:2] == ["curl", "-N"]
        options = dict(zip(words[3::2], words[4::2], strict=True))
        assert set(options) == {"-H", "-d"}
        name, value = options["-H"].split(": ")
        async with served.client() as client:
            streamed = await client.post(words[2], content=options["-d"], headers={name: value})
    events = events_of(streamed.text)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events).strip()
    assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
