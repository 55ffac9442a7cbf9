"""Requests that coding agents sent, recorded without their texts, get answers as these agents read them: the status,
the events, the notes, and a prompt that is found in the cache. `make test-clients RECORD=1` records them.
"""

import itertools
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from troupellm import Engine
from troupellm.tests.support.clients.client_scripts import NUM_ODD_STEPS
from troupellm.tests.support.clients.recorded_answers import carries_on, check_stream, events_of_any, uncached
from troupellm.tests.support.clients.recorded_requests import conversation, read_requests
from troupellm.tests.support.servers.serving import running_server
from troupellm.tests.support.workers.scripted_model import scripted_settings, write_scripted_model

RECORDED = sorted((Path(__file__).parent / "clients" / "recorded").glob("*.jsonl"))
FIRST, BESIDE = NUM_ODD_STEPS + 1, 1
"""Requests that are replayed: those of the odd steps, and those on either side of where the conversation was cut."""


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """The requests of every client, each with the answer that it gets; the clients run side by side."""
    return anyio.run(replay, write_scripted_model(tmp_path_factory.mktemp("scripted")))


async def replay(folder: Path) -> dict[str, list[tuple[dict[str, Any], httpx.Response]]]:
    settings = scripted_settings(folder) | {"served_model_name": ("troupe",), "device": "cpu", "num_threads": 1}
    found: dict[str, list[tuple[dict[str, Any], httpx.Response]]] = {}
    async with Engine(folder, **settings, kv_cache_memory_bytes=64 * 2**20) as engine, running_server(engine) as served:

        async def ask(path: Path) -> None:
            answers = found[path.stem] = []
            async with served.client() as client:
                for request in chosen(read_requests(path)):
                    answer = await client.post(request["path"], json=request["body"], headers=request["headers"])
                    answers.append((request, answer))

        async with anyio.create_task_group() as group:
            for path in RECORDED:
                group.start_soon(ask, path)
    return found


def chosen(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lengths = [len(conversation(request["body"])) for request in requests]
    cuts = [place for place in range(FIRST, len(lengths)) if lengths[place] < lengths[place - 1]]
    near = {place for cut in cuts for place in range(cut - BESIDE, cut + BESIDE + 1)}
    return [request for place, request in enumerate(requests) if place < FIRST or place in near]


def test_requests_of_three_agents_are_recorded():
    assert {path.stem for path in RECORDED} >= {"claude-code", "codex", "opencode"}


@pytest.mark.parametrize("name", [path.stem for path in RECORDED])
def test_each_request_gets_the_events_and_notes_of_its_client(replayed, name):
    for request, answer in replayed[name]:
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-troupellm-skipped", "") == request["skipped"]
        check_stream(request["path"], answer.text)


@pytest.mark.parametrize("name", [path.stem for path in RECORDED])
def test_each_turn_finds_the_prompt_of_the_turn_before(replayed, name):
    turns = [(request["body"], answer.text) for request, answer in replayed[name]]
    assert sum(carries_on(before, after) for (before, _), (after, _) in itertools.pairwise(turns)) >= 3
    assert uncached(turns) == []


@pytest.mark.parametrize("name", [path.stem for path in RECORDED])
def test_calls_with_and_without_thoughts_come_out_whole(replayed, name):
    """The next step of the script is read back from the conversation, thoughts that the client sent back among it."""
    kinds = "".join(str(event) for _, answer in replayed[name] for event in events_of_any(answer.text))
    assert any(mark in kinds for mark in ("thinking_delta", "signature_delta", "reasoning"))
    assert any(mark in kinds for mark in ("input_json_delta", "function_call_arguments", "tool_calls"))
