"""Every B row of the fault table on every route that has a JSON body, streamed and not.

The routes come from the server's own table, so one that is added later is attacked too, and the test says so where
nobody has told how a right request looks there. All of it is slow; `make test` runs a sample.
"""

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from canary import Attacked, under_many as under_attack
from fault_rows import ROWS, cases
from serving import server_config

from troupellm.protocol.config import ServerConfig
from troupellm.server.app import routes
from troupellm.server.host import EngineHost
from troupellm.server.router import Route

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "Hi"}]
RIGHT: dict[str, dict[str, Any]] = {
    # path: a body that is served
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2, "store": False},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72, 73]},
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/classify": {"input": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    "/score": {"text_1": "Hi", "text_2": "Ho"},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho", "Hu"]},
    "/v2/rerank": {"query": "Hi", "documents": ["Ho", "Hu"]},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/rerank": {"query": "Hi", "documents": ["Ho", "Hu"]},
}
REFUSING = {"/classify", "/v1/batches"}
"""Routes that refuse even this: the model has no classes, and there is no such file."""
CHATTING = {"/tokenize", "/v1/embeddings", "/pooling", "/classify"}
"""Routes that take a conversation instead, which alone makes them look at what is said of templates."""
SKIPPING = {"/v1/messages", "/v1/responses"}
"""Routes that skip tools of a kind that they do not know."""
COUNTING = {"/v1/responses/input_tokens", "/v1/messages/count_tokens"}
"""Routes that read the prompt only: what else is said there need not make sense."""
HANDLED = {"response_format", "structured_outputs", "tools", "tool_choice", "modalities", "functions", "function_call"}
"""Fields of any form that some routes do something with."""
OWN_ERRORS = {"openai": {"message", "type", "param", "code"}, "anthropic": {"type", "message"}}
HERE = str(Path(__file__).resolve().parents[2])
LEAKS = re.compile(rf"Traceback|File \"|{re.escape(HERE)}|site-packages|object at 0x|msgspec\.|troupellm\.")
SAMPLE = 200
JSON = {"content-type": "application/json"}


def attackable() -> list[Route]:
    table = routes(EngineHost(ServerConfig()), "/v1")
    return [route for route in table if route.method == "POST" and route.body is not None and route.scope == "api"]


def fields_of(route: Route) -> tuple[set[str], set[str]]:
    """What a route's body knows, and what of that is refused altogether."""
    kinds = msgspec.inspect.type_info(route.body)
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


def attacks(row: str) -> list[tuple[str, str, Any, str, bool]]:
    """(path, field, value, verdict, stream) of a row, over all routes."""
    found = []
    for route in attackable():
        known, refusing = fields_of(route)
        for field, value, given in cases(row, known, refusing):
            lenient = route.path in COUNTING or (field == "tools" and route.path in SKIPPING)
            verdict = "odd" if lenient and given == "range" else given
            streams = (False, True) if route.streams else (False,)
            found += [(route.path, field, value, verdict, stream) for stream in streams]
    return found


def test_no_route_is_forgotten():
    assert {route.path for route in attackable()} == set(RIGHT), "tell in RIGHT how a right request looks"


@pytest.mark.parametrize("row", ROWS)
def test_every_row_says_something_of_some_route(row):
    verdicts = {verdict for _, _, _, verdict, _ in attacks(row)}
    assert verdicts & {"type", "range"} or row == "B12"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
async def test_B_rows_on_every_route(tiny_engine, row, tmp_path):
    async with tiny_engine() as engine, under_attack(engine, server_config(files_dir=str(tmp_path))) as attacked:
        await run(attacked, attacks(row))


async def test_B_rows_a_sample(tiny_engine, tmp_path):
    every = [attack for row in ROWS for attack in attacks(row) if len(str(attack[2])) < 10_000]
    chosen = random.Random(4).sample(every, SAMPLE)
    assert {path for path, *_ in chosen} == set(RIGHT)
    async with tiny_engine() as engine, under_attack(engine, server_config(files_dir=str(tmp_path))) as attacked:
        for path, body in RIGHT.items():
            if path not in REFUSING:
                response = await attacked.client.post(path, json=body | {"model": "tiny"})
                assert response.status_code == 200, (path, response.text)
        await run(attacked, chosen)


async def run(attacked: Attacked, chosen: list[tuple[str, str, Any, str, bool]]) -> None:
    shapes = {route.path: route.error_shape for route in attackable()}
    wrong = []
    for path, field, value, verdict, stream in chosen:
        chats = path in CHATTING and field in ("tools", "chat_template", "chat_template_kwargs")
        right = {"messages": USER} if chats else RIGHT[path]
        body = {"model": "tiny"} | right | ({"stream": True} if stream else {}) | {field: value}
        response = await attacked.client.post(path, content=msgspec.json.encode(body), headers=JSON)
        problem = problem_of(response, field, verdict, stream, shapes[path], path)
        if problem:
            wrong.append((path, field, str(value)[:80], verdict, stream, problem))
    assert not wrong, f"{len(wrong)} of {len(chosen)}\n" + "\n".join(map(str, wrong[:60]))


def problem_of(response: Any, field: str, verdict: str, stream: bool, shape: str, path: str) -> str | None:
    text, status = response.text, response.status_code
    if LEAKS.search(text):
        return f"leaks {text[:300]}"
    if status == 200:
        if verdict != "odd" and path not in REFUSING:
            return f"served {text[:200]}"
        return stream_problem(text) if stream else None
    wanted = 404 if field == "model" else 400
    if status != wanted and not (path in REFUSING and 400 <= status < 500):
        return f"{status} {text[:300]}"
    error = response.json()["error"]
    if set(error) != OWN_ERRORS[shape] or len(error["message"]) > 512:
        return f"shape {text[:300]}"
    if shape == "openai" and verdict == "type" and not str(error["param"]).startswith(field):
        return f"param {error}" if path not in REFUSING else None
    return None


def stream_problem(text: str) -> str | None:
    """A stream that was begun ends as its API has it, and not with an error."""
    if "event: error" in text or 'data: {"error"' in text:
        return f"an error in a success: {text[-300:]}"
    ends = ("data: [DONE]\n\n", '"type":"message_stop"}\n\n')
    if not text.endswith(ends) and "event: response.completed" not in text and "response.incomplete" not in text:
        return f"silently short: {text[-200:]}"
    return None
