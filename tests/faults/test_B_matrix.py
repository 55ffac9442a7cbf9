"""Every B row of the fault table on every route that has a JSON body, streamed and not.

The routes come from the server's own table, so one that is added later is attacked too, and the test says so where
where a right request of a route is not declared. All of it is slow; `make test` runs a sample of each route.
"""

import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.app.routes import routes
from troupellm.server.base.router import Route
from troupellm.server.host.server_state import ServerState
from troupellm.tests.support.checkpoints import tiny_encoder
from troupellm.tests.support.servers.canary import Attacked, under_many as under_attack
from troupellm.tests.support.servers.fault_rows import ROWS, cases
from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "Hi"}]
RIGHT: dict[str, dict[str, Any]] = {
    # path: a body that is served
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions/render": {"messages": USER, "max_tokens": 2},
    "/v1/completions/render": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2, "store": False},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi"},
    "/v1/conversations": {"items": USER},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": {"messages": USER, "max_tokens": 2}}]},
    "/api/chat": {"messages": USER, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 2}},
    "/api/pull": {},
    "/api/show": {},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72, 73]},
    "/v1/embeddings": {"input": "Hi"},
    "/v2/embed": {"texts": ["Hi"], "input_type": "search_query"},
    "/invocations": {"messages": USER, "max_tokens": 2},
    "/pooling": {"input": "Hi"},
    "/classify": {"input": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    "/score": {"text_1": "Hi", "text_2": "Ho"},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho", "Hu"]},
    "/v2/rerank": {"query": "Hi", "documents": ["Ho", "Hu"]},
    "/rerank": {"query": "Hi", "documents": ["Ho", "Hu"]},
    "/v1/batches": {"input_file_id": "UPLOADED", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/abort_requests": {"request_ids": ["nobody"]},
    "/log_level": {"level": "info"},
}
CONVERSATION = "{conversation_id}"
"""Stands for a conversation that is there, see `attacked_server`."""
INVOCATIONS = "/invocations"
"""The route whose body is that of another one, here of a chat."""
CLASSES = "/classify"
"""The route that wants a model of its own."""
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}
CHATTING = {"/tokenize", "/v1/embeddings", "/pooling", "/classify"}
"""Routes that take a conversation instead, which alone makes them look at what is said of templates."""
SKIPPING = {"/v1/messages", "/v1/responses"}
"""Routes that skip tools of a kind that they do not know."""
COUNTING = {"/v1/responses/input_tokens", "/v1/messages/count_tokens"}
"""Routes that read the prompt only: what else is said there need not make sense."""
GUIDES = {
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema", "regex", "ebnf",
}  # fmt: skip
"""Fields whose grammar is compiled for an answer only."""
UNUSED = {
    "/v1/chat/completions/render": GUIDES,
    "/v1/completions/render": GUIDES,
    "/v1/responses/compact": {
        "max_output_tokens", "min_tokens", "stop", "stop_token_ids", "structured_outputs", "thinking_token_budget",
        "top_logprobs",
    },
}  # fmt: skip
"""Fields of an answer that a route without an answer of its own does not read to the end."""
HANDLED = {"response_format", "structured_outputs", "tools", "tool_choice", "modalities", "functions", "function_call"}
"""Fields of any form that some routes do something with."""
ADAPTERS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""Routes that serve something only where there are adapters; `test_F_adapters` attacks them."""
OPENAI = {"message", "type", "param", "code"}
OWN_ERRORS = {"openai": OPENAI, "responses": OPENAI, "anthropic": {"type", "message"}, "ollama": {"message"}}
HERE = str(Path(__file__).resolve().parents[2])
LEAKS = re.compile(rf"Traceback|File \"|{re.escape(HERE)}|site-packages|object at 0x|msgspec\.|troupellm\.")
SAMPLE = {False: 8, True: 3}
"""Of each route, by whether it is odd only."""
SENT = {"content-type": "application/json", "authorization": "Bearer boss"}
"""The key is that of the admin routes; the others want none."""

Attack = tuple[str, str, Any, str, bool]
"""Path, field, value, verdict, and whether a stream is asked for."""


def attackable() -> list[Route]:
    table = routes(ServerState(ServerConfig()), "/v1")
    return [
        route for route in table if route.method == "POST" and route.body is not None and route.path not in ADAPTERS
    ]


def fields_of(route: Route) -> tuple[set[str], set[str]]:
    """The fields of a route's body, and those of them that are refused altogether."""
    kinds = msgspec.inspect.type_info(ChatRequest if route.path == INVOCATIONS else route.body)
    structs = kinds.types if isinstance(kinds, msgspec.inspect.UnionType) else (kinds,)
    known: set[str] = set()
    refusing: set[str] = set()
    for kind in structs:
        assert isinstance(kind, msgspec.inspect.StructType)
        for field in kind.fields:
            known.add(field.encode_name)
            plain = field.type.type if isinstance(field.type, msgspec.inspect.Metadata) else field.type
            if isinstance(plain, msgspec.inspect.AnyType) and field.encode_name not in HANDLED:
                refusing.add(field.encode_name)
    return known, refusing


def attacks(row: str) -> list[Attack]:
    """A row, over all routes."""
    found = []
    for route in attackable():
        known, refusing = fields_of(route)
        for field, value, given in cases(row, known, refusing):
            lenient = route.path in COUNTING or (field == "tools" and route.path in SKIPPING)
            lenient |= field in UNUSED.get(route.path, ())
            lenient |= route.path == "/v1/messages" and "prompt_embeds" in str(value)[:200]  # a block that it skips
            verdict = "odd" if lenient and given == "range" else given
            streams = (False, True) if route.streams else (False,)
            found += [(route.path, field, value, verdict, stream) for stream in streams]
    return found


def test_no_route_is_forgotten():
    assert {route.path for route in attackable()} == set(RIGHT), "tell in RIGHT how a right request looks"


@pytest.mark.parametrize("row", ROWS)
def test_every_row_says_something_of_some_route(row):
    assert {verdict for _, _, _, verdict, _ in attacks(row)} & {"type", "range"}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
async def test_B_rows_on_every_route(tiny_engine, row, tmp_path):
    async with attacked_server(tiny_engine, tmp_path) as (attacked, right):
        await run(attacked.client, [attack for attack in attacks(row) if attack[0] != CLASSES], right)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_B_rows_on_a_classifier(tmp_path):
    await run_on_a_classifier(tmp_path, [attack for row in ROWS for attack in attacks(row) if attack[0] == CLASSES])


@pytest.mark.slow
async def test_B3_where_tokens_are_drafted(tiny_engine, tmp_path):
    """Greedy rows get drafts, others do not: either way bad numbers are refused, and odd ones served."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    drafts |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    async with attacked_server(tiny_engine, tmp_path, speculative_config=drafts) as (attacked, right):
        await run(attacked.client, [attack for attack in attacks("B3") if attack[0] != CLASSES], right)
        body = {"model": "tiny", "prompt": "ab" * 20, "max_tokens": 24, "ignore_eos": True}
        answers = []
        for temperature in (0, -0.0, 1e-320):  # all of them greedy
            response = await attacked.client.post("/v1/completions", json=body | {"temperature": temperature})
            answers.append(response.json()["choices"][0]["text"])
        assert len(set(answers)) == 1, answers
        assert attacked.engine.snapshot().scheduler.drafts > 0


def sample(*paths: str) -> list[Attack]:
    """Some attacks on each of the routes."""
    every = [attack for row in ROWS for attack in attacks(row) if len(str(attack[2])) < 10_000]
    chosen: list[Attack] = []
    for path in paths:
        for odd, number in SAMPLE.items():
            given = [attack for attack in every if attack[0] == path and (attack[3] == "odd") == odd]
            chosen += random.Random(path).sample(given, min(number, len(given)))
    return chosen


async def test_B_rows_a_sample(tiny_engine, tmp_path):
    paths = [path for path in RIGHT if path != CLASSES]
    async with attacked_server(tiny_engine, tmp_path) as (attacked, right):
        await run(attacked.client, sample(*paths), right)


async def test_B_rows_a_sample_on_a_classifier(tmp_path):
    await run_on_a_classifier(tmp_path, sample(CLASSES))


@asynccontextmanager
async def attacked_server(
    tiny_engine: Any, folder: Path, **settings: Any
) -> AsyncIterator[tuple[Attacked, dict[str, dict[str, Any]]]]:
    """With canaries; and what is right there, which was served."""
    config = server_config(files_dir=str(folder), admin_api_key=("boss",))
    async with tiny_engine(**settings) as engine, under_attack(engine, config) as attacked:
        batches = attacked.served.host.batches
        batches.runs = True  # batches do not run here; another test covers them
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", json.dumps(LINE).encode())}}
        file = (await attacked.client.post("/v1/files", **form)).json()["id"]
        kept = (await attacked.client.post("/v1/conversations", json={}, headers=SENT)).json()["id"]
        attacked.client.event_hooks["request"].append(partial(name_conversation, kept))
        right = RIGHT | {"/v1/batches": RIGHT["/v1/batches"] | {"input_file_id": file}}
        await check_served(attacked.client, {path: body for path, body in right.items() if path != CLASSES})
        yield attacked, right
        await batches.close()  # the database is open until the server ends


async def name_conversation(name: str, request: httpx.Request) -> None:
    """A path of the table becomes that of a conversation."""
    given = request.url.path.replace(CONVERSATION, name)
    request.url = request.url.copy_with(path=given)


async def run_on_a_classifier(folder: Path, chosen: list[Attack]) -> None:
    """Its canary is a text whose classes stay what they are."""
    tiny_encoder.write_encoder(folder / "tiny", lambda: tiny_encoder.distilbert(3))
    async with (
        Engine(folder / "tiny", device="cpu", num_threads=1) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        canary = {"model": "tiny", "input": "canary"}
        before = (await client.post(CLASSES, json=canary)).json()["data"]
        assert before[0]["num_classes"] == 3
        await check_served(client, {CLASSES: RIGHT[CLASSES]})
        await run(client, chosen, RIGHT)
        assert (await client.post(CLASSES, json=canary)).json()["data"] == before


async def check_served(client: httpx.AsyncClient, right: dict[str, dict[str, Any]]) -> None:
    """Else the bad requests would be refused for something else."""
    for path, body in right.items():
        response = await client.post(path, json={"model": "tiny"} | body, headers=SENT)
        assert response.status_code == 200, (path, response.text)


async def run(client: httpx.AsyncClient, chosen: list[Attack], rights: dict[str, dict[str, Any]]) -> None:
    assert chosen
    shapes = {route.path: route.error_shape for route in attackable()}
    wrong = []
    for path, field, value, verdict, stream in chosen:
        chats = path in CHATTING and field in ("messages", "tools", "chat_template", "chat_template_kwargs")
        right = {"messages": USER} if chats else rights[path]
        body = {"model": "tiny"} | right | ({"stream": True} if stream else {}) | {field: value}
        response = await client.post(path, content=msgspec.json.encode(body), headers=SENT)
        problem = problem_of(response, field, verdict, stream, shapes[path])
        if problem:
            wrong.append((path, field, str(value)[:80], verdict, stream, problem))
    assert not wrong, f"{len(wrong)} of {len(chosen)}\n" + "\n".join(map(str, wrong[:60]))


def problem_of(response: Any, field: str, verdict: str, stream: bool, shape: str) -> str | None:
    text, status = response.text, response.status_code
    if LEAKS.search(text):
        return f"leaks {text[:300]}"
    if status == 200:
        if verdict != "odd":
            return f"served {text[:200]}"
        return stream_problem(text) if stream else None
    if status != (404 if field == "model" else 400):
        return f"{status} {text[:300]}"
    error = response.json()["error"]
    error = {"message": error} if shape == "ollama" else error
    if set(error) != OWN_ERRORS[shape] or len(error["message"]) > 512:
        return f"shape {text[:300]}"
    if shape not in ("anthropic", "ollama") and verdict == "type" and not str(error["param"]).startswith(field):
        return f"param {error}"
    return None


def stream_problem(text: str) -> str | None:
    """A stream that was begun ends as its API has it, and not with an error but for a response that is too long."""
    if text.startswith("{"):
        last = json.loads(text.splitlines()[-1])
        return None if last.get("done") or last.get("status") == "success" else f"silently short: {last}"
    if "event: response.failed" in text and '"context_length_exceeded"' in text:
        return None
    if "event: error" in text or 'data: {"error"' in text:
        return f"an error in a success: {text[-300:]}"
    ends = ("data: [DONE]\n\n", '"type":"message_stop"}\n\n')
    if not text.endswith(ends) and "event: response.completed" not in text and "response.incomplete" not in text:
        return f"silently short: {text[-200:]}"
    return None
