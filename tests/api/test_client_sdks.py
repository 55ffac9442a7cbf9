"""Clients that users have, unchanged, each in a process of its own against a server of the built-in model.

They live in an environment beside ours (`make test-all` makes it), for they bring other versions of what we use.
"""

import json
import os
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.tests.support.environment.absence import absent
from troupellm.tests.support.servers.processes import ServerProcess, ready_process

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
    """A package that must be in the environment of the clients."""
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
MODEL = "troupe-builtin"
TEXTS = ["a fox", "x"]
"""Texts that clients ask vectors of."""


async def vectors_of(server: ServerProcess) -> list[list[float]]:
    """The server's own vectors, without any client."""
    async with server.client() as client:
        answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": TEXTS})
    return [item["embedding"] for item in answer.json()["data"]]


def check_vectors(seen: list[list[float]], wanted: list[list[float]]) -> None:
    assert wanted[0] != wanted[1]
    for vector, right in zip(seen, wanted, strict=True):
        assert vector == pytest.approx(right, abs=1e-3)


def types_of(events: list[dict[str, Any]]) -> list[str]:
    """Kinds of the events of a response, each once in a row; and all that their numbers and names must be."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    items = [event["item"]["id"] for event in events if "item" in event]
    assert {event["item_id"] for event in events if "item_id" in event} == set(items)
    assert len(set(items)) == 1
    assert (
        {event.get("output_index", 0) for event in events} == {event.get("content_index", 0) for event in events} == {0}
    )
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]


def check_text_events(events: list[dict[str, Any]], text: str) -> None:
    """The stream of an answer of one text that ends at its limit of eight tokens."""
    assert types_of(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    created, begun, added, part = events[:4]
    assert created["response"]["status"] == begun["response"]["status"] == "in_progress"
    assert created["response"]["output"] == added["item"]["content"] == []
    assert (added["item"]["type"], added["item"]["status"], part["part"]["text"]) == ("message", "in_progress", "")
    text_done, part_done, item_done, last = events[-4:]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert (
        said == text_done["text"] == part_done["part"]["text"] == item_done["item"]["content"][0]["text"] == text != ""
    )
    assert item_done["item"]["status"] == last["response"]["status"] == "incomplete"
    assert last["response"]["output"] == [item_done["item"]]
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["usage"]["output_tokens"] == 8


def check_call_events(events: list[dict[str, Any]]) -> None:
    """The stream of an answer that is one call."""
    assert types_of(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added, (done, item_done, last) = events[2], events[-3:]
    assert (added["item"]["type"], added["item"]["name"], added["item"]["arguments"]) == ("function_call", "add", "")
    said = "".join(event["delta"] for event in events if event["type"].endswith("arguments.delta"))
    assert said == done["arguments"] == item_done["item"]["arguments"]
    assert sorted(json.loads(said)) == ["first", "second"]
    assert item_done["item"]["call_id"] == added["item"]["call_id"]
    assert last["response"]["output"] == [item_done["item"]]


async def likelihood(client: httpx.AsyncClient, context: str, continuation: str) -> tuple[float, bool]:
    """Log-probability of a continuation as the server tells it of a prompt, and whether it is what would be said."""
    plain = {"model": MODEL, "add_special_tokens": False}
    known = (await client.post("/tokenize", json=plain | {"prompt": context})).json()["count"]
    text = {"prompt": context + continuation}
    tokens = (await client.post("/tokenize", json=plain | text)).json()["tokens"]
    answer = await client.post("/v1/completions", json=plain | text | {"max_tokens": 1, "prompt_logprobs": 1})
    tables = answer.json()["choices"][0]["prompt_logprobs"]
    entries = [table[str(token)] for token, table in list(zip(tokens, tables, strict=True))[known:]]
    assert entries
    return sum(entry["logprob"] for entry in entries), all(entry["rank"] == 1 for entry in entries)


async def test_langchain_chats_streams_and_calls_tools(tmp_path):
    need(f"{PACKAGES}/langchain_openai")
    async with ready_process(None, small=False) as server:
        seen = await run(tmp_path, PYTHON, SCRIPTS / "langchain_client.py", f"{server.url}/v1", MODEL)
        vectors = await vectors_of(server)
    assert "68" in seen["whole"]
    assert seen["streamed"] == seen["whole"]
    assert seen["streamed_usage"] == seen["usage"] > 0
    assert seen["batch"] == [seen["whole"]] * 2
    assert seen["finish"] == "stop"
    assert seen["calls"] == ADD
    assert seen["streamed_said"] == seen["said"]
    assert seen["structured"] == ["first", "second"]
    assert seen["streamed_values"] == seen["structured_values"]
    check_vectors(seen["vectors"], vectors)
    check_vectors([seen["query"], vectors[1]], vectors)
    assert seen["text_streamed"] == seen["text"] != ""


async def test_litellm_chats_streams_and_calls_tools(tmp_path):
    need(f"{PACKAGES}/litellm")
    async with ready_process(None, small=False) as server:
        seen = await run(tmp_path, PYTHON, SCRIPTS / "litellm_client.py", f"{server.url}/v1", MODEL)
        vectors = await vectors_of(server)
    assert "68" in seen["whole"]
    assert seen["streamed"] == seen["whole"]
    assert seen["streamed_usage"] == [seen["usage"]]
    assert seen["at_once"] == [seen["whole"]] * 3
    assert seen["calls"] == ADD
    assert seen["streamed_said"] == seen["said"]
    assert seen["text_streamed"] == seen["text"] != ""
    check_vectors(seen["vectors"], vectors)
    assert seen["refused"] == "NotFoundError"


async def test_lm_eval_gets_the_models_own_likelihoods(tmp_path):
    need(f"{PACKAGES}/lm_eval")
    async with ready_process(None, small=False) as server:
        script = SCRIPTS / "lm_eval_client.py"
        seen = await run(tmp_path, PYTHON, script, f"{server.url}/v1", MODEL, BUILTIN_FOLDER, tmp_path)
        choices = seen["local-completions troupe_choices"]
        async with server.client() as client:
            wanted = [[await likelihood(client, *option) for option in asked] for asked in choices["asked"]]
    assert len(choices["answers"]) == len(wanted) == 6
    # Each answer is a log-probability, and whether it is what the model would say.
    for answer, right in zip(choices["answers"], wanted, strict=True):
        assert len(answer) == 2
        for (option,), (logprob, greedy) in zip(answer, right, strict=True):
            assert float(option[0]) == pytest.approx(logprob, abs=0.01)
            assert str(option[1]) == str(greedy)
    best = [first[0] >= second[0] for first, second in wanted]
    assert choices["scores"]["acc,none"] == pytest.approx(sum(best) / len(best))
    for name in ("local-completions troupe_story", "local-chat-completions troupe_question"):
        assert len(seen[name]["answers"]) == 6
        assert all(answer[0][0].strip() for answer in seen[name]["answers"])
    assert any("68" in answer[0][0] for answer in seen["local-chat-completions troupe_question"]["answers"])


async def test_openai_node_chats_streams_and_calls_tools(tmp_path):
    need("node/node_modules/openai")
    async with ready_process(None, small=False) as server:
        folder, url = ENVIRONMENT / "node", f"{server.url}/v1"
        seen = await run(tmp_path, "node", SCRIPTS / "node_client.mjs", folder, url, MODEL)
        vectors = await vectors_of(server)
    assert "68" in seen["whole"]
    assert seen["streamed"] == seen["helper"] == seen["whole"]
    assert seen["logprobs"] == seen["usage"] == seen["streamedUsage"]
    assert seen["structured"] == ["first", "second"]
    assert seen["structuredStreamed"] == seen["structuredText"]
    assert seen["calls"] == ADD
    assert seen["said"] == seen["saidHelper"] == seen["saidWhole"]
    check_vectors(seen["coded"], vectors)
    check_vectors(seen["floats"], vectors)
    assert seen["textStreamed"] == seen["text"] != ""
    assert seen["models"] == [MODEL]
    assert "68" in seen["response"]
    assert seen["toldHelper"] == seen["told"]
    check_text_events(seen["events"], seen["told"])
    check_call_events(seen["callEvents"])
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


def check_ollama(seen: dict[str, Any], vectors: list[list[float]]) -> None:
    """The common part of both packages."""
    assert "68" in seen["whole"]
    assert seen["streamed"] == seen["told"] == seen["whole"]
    assert seen["done"] is True
    assert seen["counts"][:2] == seen["counts"][2:]
    assert min(seen["counts"]) > 0
    assert seen["formed"] == ["first", "second"]
    assert seen["call"] == ["get_weather", {"city": "Paris"}]
    assert seen["answered"]
    assert [status for status, _ in seen["refused"]] == [404, 400]
    assert "options.temperature" in seen["refused"][1][1]
    assert seen["models"] == seen["running"] == [f"{MODEL}:latest"]
    assert set(seen["capabilities"]) >= {"completion", "tools", "embedding"}
    assert seen["context"] > 0
    check_vectors([*seen["vectors"][:1], vectors[1]], vectors)
    check_vectors([seen["older"], vectors[1]], vectors)
    assert seen["pulled"] == "success"


async def test_ollama_of_pypi_works_unchanged(tmp_path):
    need(f"{PACKAGES}/ollama")
    async with ready_process(None, small=False) as server:
        seen = await run(tmp_path, PYTHON, SCRIPTS / "ollama_client.py", server.url, MODEL)
        vectors = await vectors_of(server)
    check_ollama(seen, vectors)
    assert seen["told_streamed"] == seen["told"]
    assert seen["alongside"] == [seen["whole"]] * 3
    assert seen["loaded"] == "load"


async def test_ollama_of_npm_works_unchanged(tmp_path):
    need("node/node_modules/ollama")
    async with ready_process(None, small=False) as server:
        seen = await run(tmp_path, "node", SCRIPTS / "ollama_client.mjs", ENVIRONMENT / "node", server.url, MODEL)
        vectors = await vectors_of(server)
    check_ollama(seen, vectors)
    assert seen["aborted"] == "AbortError"
    assert seen["version"]
