"""Inputs that coding agents and their gateways get wrong: each is refused by its name, or passed over with a note."""

import base64
import json
import zlib

import pytest
import zstandard

from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "Hi"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES = {
    CHAT: {"messages": HI, "max_tokens": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1, "store": False},
    MESSAGES: {"messages": HI, "max_tokens": 1},
}
NOTE = "x-troupellm-skipped"


def tools(path: str, names: list[str]) -> list[dict]:
    """Tools as the API of this path defines them, each described by its place."""
    schema = {"type": "object", "properties": {}}
    functions = [{"name": name, "description": f"d{place}"} for place, name in enumerate(names)]
    if path == MESSAGES:
        return [function | {"input_schema": schema} for function in functions]
    if path == RESPONSES:
        return [function | {"type": "function", "parameters": schema} for function in functions]
    return [{"type": "function", "function": function | {"parameters": schema}} for function in functions]


async def test_more_than_1024_tools_are_refused_with_their_number(tiny_engine):
    async with (
        tiny_engine(tool_call_parser="hermes") as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        for path, body in BODIES.items():
            names = [f"f{number}" for number in range(1025)]
            answer = await client.post(path, json=body | {"tools": tools(path, names)})
            assert answer.status_code == 400, (path, answer.text)
            assert "1024" in answer.json()["error"]["message"]
            assert "1025" in answer.json()["error"]["message"]


async def test_of_two_tools_with_one_name_the_last_one_is_shown(tiny_engine):
    count = {RESPONSES: "/v1/responses/input_tokens", MESSAGES: "/v1/messages/count_tokens"}
    async with (
        tiny_engine(tool_call_parser="hermes", max_model_len=2048) as engine,
        running_server(engine) as served,
        served.client() as client,
    ):
        for path in (RESPONSES, MESSAGES):
            body = {name: value for name, value in BODIES[path].items() if name in ("input", "messages")}
            both = tools(path, ["f", "f"])
            both[0]["description"] *= 50
            twice = await client.post(count[path], json=body | {"tools": both})
            last = await client.post(count[path], json=body | {"tools": both[1:]})
            assert twice.json() == last.json(), path
        both = tools(CHAT, ["f", "f"])
        twice, last = [
            (await client.post("/tokenize", json={"messages": HI, "tools": given})).json() for given in (both, both[1:])
        ]
        assert twice == last


MARK = {"cache_control": {"type": "ephemeral"}}


def marked(number: int) -> list[dict]:
    return [{"type": "text", "text": "x"} | MARK for _ in range(number)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"system": marked(5)}, "got 5"),
        ({"system": marked(2), "messages": [{"role": "user", "content": marked(2)}], **MARK}, "got 5"),
        (
            {
                "tools": [{"name": "f", "input_schema": {"type": "object"}} | MARK],
                "system": marked(2),
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": marked(2)}]}
                ],
            },
            "got 5",
        ),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"ttl": "2h"}}]}, "system[0].cache_control.ttl"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"ttl": 5}}]}, "system[0].cache_control.ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "for_ever"}}]}, "cache_control.type"),
        ({"messages": [{"role": "user", "content": [marked(1)[0] | {"cache_control": "x"}]}]}, "must be an object"),
    ],
)
async def test_marks_for_the_cache_that_are_too_many_or_wrong_are_refused(tiny_engine, fields, said):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for path, body in ((MESSAGES, BODIES[MESSAGES]), ("/v1/messages/count_tokens", {"messages": HI})):
            answer = await client.post(path, json=body | fields)
            assert answer.status_code == 400, (path, answer.text)
            assert said in answer.json()["error"]["message"]


async def test_four_marks_for_the_cache_are_served_in_each_turn_of_a_thread(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        first = await client.post(MESSAGES, json=BODIES[MESSAGES] | {"system": marked(4), "thread": {"type": "create"}})
        thread = {"type": "continue", "previous_message_id": first.json()["id"]}
        ttl = [block | {"cache_control": {"type": "ephemeral", "ttl": "1h"}} for block in marked(4)]
        turn = [{"role": "user", "content": ttl}]
        second = await client.post(MESSAGES, json=BODIES[MESSAGES] | {"messages": turn, "thread": thread})
    assert (first.status_code, second.status_code) == (200, 200), second.text


@pytest.mark.parametrize("name", ["x" * 513, "a\x07b"], ids=["long", "control character"])
async def test_a_session_id_that_cannot_be_one_is_noted(tiny_engine, name):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for path, body in BODIES.items():
            answer = await client.post(path, json=body | {"session_id": name})
            assert answer.status_code == 200, (path, answer.text)
            assert "session session_id" in answer.headers[NOTE]


async def test_ten_thousand_unknown_items_are_answered_with_a_note(tiny_engine):
    items = [{"type": f"kind_{number}"} for number in range(10_000)]
    blocks = [{"type": "text", "text": "x"}, *({"type": f"kind_{number}"} for number in range(10_000))]
    old = [{"role": "assistant", "content": blocks}, *HI]
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for path, fields in ((RESPONSES, {"input": items}), (MESSAGES, {"messages": old})):
            answer = await client.post(path, json=BODIES[path] | fields)
            assert answer.status_code == 200, (path, answer.text)
            assert answer.headers[NOTE].endswith("more")


async def test_a_trigger_of_compaction_stands_last(tiny_engine):
    items = [{"type": "compaction_trigger"}, {"role": "user", "content": "Hi"}]
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        for path, more in ((RESPONSES, BODIES[RESPONSES]), ("/v1/responses/compact", {})):
            answer = await client.post(path, json=more | {"input": items})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0]"), answer.text


def packed(data: bytes) -> str:
    return "trp1." + base64.urlsafe_b64encode(data).decode().rstrip("=")


@pytest.mark.parametrize(
    "text",
    ["trp1.!!", packed(b"damaged"), packed(zlib.compress(b"cut off")[:-3]), packed(zlib.compress(bytes(2**24)))],
    ids=["no base64", "damaged", "cut", "bomb"],
)
async def test_a_sealed_text_that_cannot_be_opened_is_noted(tiny_engine, text):
    items = [
        {"type": "compaction", "encrypted_content": text},
        {"type": "reasoning", "summary": [], "encrypted_content": text},
        {"role": "user", "content": "Hi"},
    ]
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        answer = await client.post(RESPONSES, json=BODIES[RESPONSES] | {"input": items})
    assert answer.status_code == 200, answer.text
    assert answer.headers[NOTE] == "item compaction, item reasoning"


async def test_bodies_in_encodings_are_bounded_whole_and_known(tiny_engine):
    def zstd(plain: bytes) -> bytes:
        return zstandard.ZstdCompressor().compress(plain)

    body = json.dumps(BODIES[RESPONSES]).encode()
    cases = [
        ("zstd", zstd(body), 200),
        ("zstd", zstd(bytes(2**26)), 413),
        ("zstd", zstd(body)[:-4], 400),
        ("br", body, 415),
    ]
    async with (
        tiny_engine() as engine,
        running_server(engine, server_config(max_body_bytes=2**20)) as served,
        served.client() as client,
    ):
        for encoding, raw, status in cases:
            headers = {"content-type": "application/json", "content-encoding": encoding}
            answer = await client.post(RESPONSES, content=raw, headers=headers)
            assert answer.status_code == status, (encoding, len(raw), answer.text)


async def test_a_billing_line_in_the_users_text_stays(tiny_engine):
    line = "x-anthropic-billing-header: cc_version=2.1; cch=0;"
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        counts = []
        for fields in ({"messages": [{"role": "user", "content": line}]}, {"messages": HI, "system": line}):
            counted = await client.post("/v1/messages/count_tokens", json=fields)
            counts.append(counted.json()["input_tokens"])
        plain = (await client.post("/v1/messages/count_tokens", json={"messages": HI})).json()["input_tokens"]
    assert counts[0] > plain + 20
    assert counts[1] == plain
