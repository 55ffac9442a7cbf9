"""Clients that users have, unchanged, each in a process of its own against a server of the built-in model.

They live in an environment beside ours (`make test-all` makes it), for they bring other versions of what we use.
"""

import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
from absence import absent
from processes import ready_process

from troupellm.models.source import BUILTIN_FOLDER

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("TROUPE_CLIENTS", ROOT / ".venv-clients"))
PYTHON = ENVIRONMENT / "bin" / "python"
PACKAGES = "lib/python3*/site-packages"
SCRIPTS = Path(__file__).parent / "clients"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OPENAI_API_KEY": "none",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "*",
}


def need(pattern: str) -> None:
    """What is to be found in the environment of the clients."""
    if not any(ENVIRONMENT.glob(pattern)):
        name = pattern.rpartition("/")[2]
        absent(f"{name} of {ENVIRONMENT.name}", "`make clients` installs it where there is a network")


async def run(folder: Path, *command: object) -> dict[str, Any]:
    """The JSON on the last line of what a client prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= QUIET | {"HF_HOME": str(folder / "hf"), "HOME": str(folder)}
    done = await anyio.run_process([str(part) for part in command], check=False, cwd=folder, env=environment)
    assert done.returncode == 0, (done.stdout[-2_000:] + done.stderr[-6_000:]).decode()
    seen: dict[str, Any] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return seen


ADD = [["add", ["first", "second"]]]


async def test_langchain(tmp_path):
    need(f"{PACKAGES}/langchain_openai")
    async with ready_process(None, small=False) as server:
        seen = await run(tmp_path, PYTHON, SCRIPTS / "langchain_client.py", f"{server.url}/v1", "troupe-builtin")
    assert "68" in seen["whole"]
    assert seen["streamed"] == seen["whole"]
    assert seen["streamed_usage"] == seen["usage"] > 0
    assert seen["batch"] == [seen["whole"]] * 2
    assert seen["finish"] == "stop"
    assert seen["calls"] == ADD
    assert seen["structured"] == ["first", "second"]
    assert seen["text_streamed"] == seen["text"] != ""


async def test_litellm(tmp_path):
    need(f"{PACKAGES}/litellm")
    async with ready_process(None, small=False) as server:
        seen = await run(tmp_path, PYTHON, SCRIPTS / "litellm_client.py", f"{server.url}/v1", "troupe-builtin")
    assert "68" in seen["whole"]
    assert seen["streamed"] == seen["whole"]
    assert seen["streamed_usage"] == [seen["usage"]]
    assert seen["at_once"] == [seen["whole"]] * 3
    assert seen["calls"] == ADD
    assert seen["text"] != ""
    assert seen["refused"] == "NotFoundError"


async def test_lm_eval(tmp_path):
    need(f"{PACKAGES}/lm_eval")
    async with ready_process(None, small=False) as server:
        script = SCRIPTS / "lm_eval_client.py"
        seen = await run(tmp_path, PYTHON, script, f"{server.url}/v1", "troupe-builtin", BUILTIN_FOLDER, tmp_path)
    choices = seen["local-completions troupe_choices"]
    assert len(choices["answers"]) == 6
    # Each answer is a log-probability, and whether it is what the model would say.
    for answer in choices["answers"]:
        for option in answer:
            assert float(option[0][0]) < 0
    assert 0 <= choices["scores"]["acc,none"] <= 1
    for name in ("local-completions troupe_story", "local-chat-completions troupe_question"):
        assert len(seen[name]["answers"]) == 6
        assert all(answer[0][0].strip() for answer in seen[name]["answers"])
    assert any("68" in answer[0][0] for answer in seen["local-chat-completions troupe_question"]["answers"])


async def test_openai_node(tmp_path):
    need("node/node_modules/openai")
    async with ready_process(None, small=False) as server:
        folder, url = ENVIRONMENT / "node", f"{server.url}/v1"
        seen = await run(tmp_path, "node", SCRIPTS / "node_client.mjs", folder, url, "troupe-builtin")
    assert "68" in seen["whole"]
    assert seen["streamed"] == seen["helper"] == seen["whole"]
    assert seen["logprobs"] == seen["usage"] == seen["streamedUsage"]
    assert seen["structured"] == ["first", "second"]
    assert seen["calls"] == ADD
    assert seen["textStreamed"] == seen["text"] != ""
    assert seen["models"] == ["troupe-builtin"]
    assert "68" in seen["response"]
    assert (seen["first"], seen["last"]) == ("response.created", "response.incomplete")
    assert seen["refused"] == ["NotFoundError", 404, "model_not_found", "model"]
    assert seen["wrong"] == ["BadRequestError", 400, "temperature"]


async def test_a_client_generated_from_the_openapi_document(tmp_path):
    need("bin/openapi-python-client")
    generator = (PYTHON, "-m", "openapi_python_client")
    async with ready_process(None, "--files-dir", str(tmp_path / "files"), small=False) as server:
        async with server.client() as client:
            (tmp_path / "openapi.json").write_text((await client.get("/openapi.json")).text)
        made = tmp_path / "made"
        (tmp_path / "config.yaml").write_text("literal_enums: true\n")
        command = [*generator, "generate", "--path", tmp_path / "openapi.json", "--output-path", made, "--meta", "none"]
        command += ["--config", tmp_path / "config.yaml"]
        done = await anyio.run_process([str(part) for part in command], check=False, cwd=tmp_path)
        output = (done.stdout + done.stderr).decode()
        assert done.returncode == 0, output
        assert "Unable to" not in output, output
        seen = await run(tmp_path, PYTHON, SCRIPTS / "generated_client.py", server.url, "troupe-builtin")
    assert "68" in seen["chat"]
    assert "68" in seen["response"] == seen["kept"] == seen["message"]
    assert (seen["vectors"], seen["files"]) == ([True], [])
    assert seen["text"] != ""
    assert seen["models"] == ["troupe-builtin"]
    assert seen["tokens"] == seen["count"] > 0
    assert seen["refused"] == ["model_not_found", "model"]
    assert seen["probe"] == "ready"
