"""The OpenAPI document: whole, valid, and what real answers are."""

import re

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.messages.kv_events import BlocksStored
from troupellm.server.app.app import App
from troupellm.server.host.server_state import ServerState
from troupellm.server.openapi.document import document


@pytest.fixture(scope="module")
def app() -> App:
    return App(ServerState(ServerConfig(admin_api_key=("admin",))), scopes=("open", "api", "admin"))


@pytest.fixture(scope="module")
def described(app):
    return document(app.routes, version="1.2", keys=True)


def operations(described):
    return [
        (path, method, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_route_is_described_and_nothing_else(app, described):
    wanted = {(route.method.lower(), f"{route.path}{{name}}" if route.tail else route.path) for route in app.routes}
    assert {(method, path) for path, method, _ in operations(described)} == wanted


def test_every_operation_says_what_it_is(described):
    names = [operation["operationId"] for _, _, operation in operations(described)]
    assert len(set(names)) == len(names)
    for path, method, operation in operations(described):
        assert operation["summary"], (method, path)
        placed = {given["name"] for given in operation.get("parameters", ()) if given["in"] == "path"}
        assert placed == set(re.findall(r"\{(\w+)\}", path))
        good = [status for status in operation["responses"] if status.startswith("2")]
        assert len(good) == 1
        for media in operation["responses"][good[0]]["content"].values():
            assert media["schema"], (method, path)


def test_every_schema_is_one_and_every_reference_leads_somewhere(described):
    for schema in described["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)

    def references(node):
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    for reference in references(described):
        assert reference.rpartition("/")[2] in described["components"]["schemas"]


def test_operations_that_need_a_key_say_so_in_the_document(app, described):
    for route in app.routes:
        path = f"{route.path}{{name}}" if route.tail else route.path
        operation = described["paths"][path][route.method.lower()]
        assert bool(operation["security"]) == (route.scope != "open")
        assert ("401" in operation["responses"]) == (route.scope != "open")


def test_streams_end_as_the_document_says(described):
    def stream(path):
        content = described["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        return "[DONE]" in content["schema"]["description"], str(content["x-event-schemas"])

    done, events = stream("/v1/chat/completions")
    assert done
    assert "/ErrorBody'" in events
    done, events = stream("/v1/responses")
    assert not done
    assert "/ErrorEvent'" in events
    assert "/ErrorBody'" not in events
    assert not stream("/v1/messages")[0]


def test_events_of_the_cache_are_described_as_the_stream_that_they_are(described):
    answer = described["paths"]["/kv_events"]["get"]["responses"]["200"]
    assert set(answer["content"]) == {"application/json", "text/event-stream"}
    assert answer["description"].startswith("A stream of events; one answer when")
    stream = answer["content"]["text/event-stream"]
    names = {schema["$ref"].rpartition("/")[2] for schema in stream["x-event-schemas"]}
    assert names == {"BlocksStored", "BlocksRemoved", "BlocksCleared", "EventsLost", "SnapshotBegins", "ErrorBody"}
    assert "[DONE]" not in stream["schema"]["description"]
    told = BlocksStored(seq=1, medium="device", group=0, key="ab", parent="", num_tokens=16)
    reference = {"$ref": "#/components/schemas/BlocksStored", "components": described["components"]}
    Draft202012Validator(reference).validate(msgspec.json.decode(msgspec.json.encode(told)))
    rare = described["paths"]["/v1/responses/{response_id}"]["get"]["responses"]["200"]["description"]
    assert rare.startswith("The answer; a stream of events when")


def test_the_form_of_a_file_is_what_the_server_checks(described):
    body = described["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert body["required"] == ["file", "purpose"]
    check = Draft202012Validator(body)
    form = {"file": "x", "purpose": "batch"}
    life = {"expires_after[anchor]": "created_at", "expires_after[seconds]": 3600}
    check.validate(form)
    check.validate(form | life)
    for wrong in (
        {"purpose": "fine-tune"},
        {"expires_after[anchor]": "now"},
        {"expires_after[seconds]": 3599},
        {"expires_after[seconds]": 30 * 24 * 3600 + 1},
    ):
        assert not check.is_valid(form | life | wrong), wrong


def test_ranges_are_those_that_are_checked(described):
    fields = described["components"]["schemas"]["CompletionRequest"]["properties"]

    def number(name):
        return next(branch for branch in fields[name]["anyOf"] if branch["type"] != "null")

    assert (number("temperature")["minimum"], number("temperature")["maximum"]) == (0.0, 2.0)
    assert number("top_p")["exclusiveMinimum"] == 0.0
    assert (number("n")["minimum"], number("n")["maximum"]) == (1, 64)
    assert number("logit_bias")["additionalProperties"] == {"type": "number", "minimum": -100, "maximum": 100}
    assert "1.0" in fields["temperature"]["description"]


_SHELL = {"type": "exec", "command": ["ls"]}
TAKEN = {
    # schema: what coding agents send of it
    "ResponsesRequest": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": None, "encrypted_content": "x"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
            {"type": "function_call", "call_id": "e", "namespace": "n", "name": "f", "arguments": "{}"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
            {"type": "local_shell_call", "call_id": "d", "status": "completed", "action": _SHELL},
            {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "web_search_call", "action": {"type": "search", "query": "x"}},
        ],
        "tools": [
            {"type": "custom", "name": "apply_patch"},
            {"type": "function", "name": "f"},
            {"type": "namespace", "name": "n", "description": "", "tools": [{"type": "function", "name": "f"}]},
        ],
    },
    "MessagesRequest": {
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "assistant", "content": [{"type": "server_tool_use"}, {"type": "redacted_thinking", "data": "x"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": True}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}],
    },
}
REFUSED = {
    "ResponsesRequest": (
        {"input": [{"type": "nonsense"}]},
        {"tools": [{"type": "function"}]},
        {"tools": [{}]},
        {"tools": [{"type": "namespace"}]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
    ),
    "MessagesRequest": tuple(
        {"max_tokens": 1, "messages": []} | wrong
        for wrong in (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            {"tools": [{"type": "custom", "name": "f"}]},
        )
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_requests_of_coding_agents_fit_the_described_schemas(described, name):
    check = Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": described["components"]})
    check.validate(TAKEN[name])
    for wrong in REFUSED[name]:
        assert not check.is_valid(wrong), wrong


async def _asked(app, path):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.get(path)


@pytest.mark.anyio
async def test_the_document_is_served_before_there_is_an_engine(app):
    answer = await _asked(app, "/openapi.json")
    assert answer.status_code == 200
    assert answer.json()["openapi"] == "3.1.0"
    assert answer.json()["paths"]["/v1/chat/completions"]["post"]["security"] == []


@pytest.mark.anyio
async def test_the_page_for_people_needs_nothing_from_elsewhere(app):
    answer = await _asked(app, "/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|src=|<link|@import", answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
