"""Rows B1 to B13 of the fault table on the responses and messages APIs, streamed and not."""

import json

import pytest

from troupellm.protocol.api.chat import ErrorBody
from troupellm.tests.support.servers.canary import under_many as under_attack

pytestmark = pytest.mark.anyio

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES = {
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}
OK = "served"
BOTH = (RESPONSES, MESSAGES)
TOOL = {"type": "function", "name": "get", "parameters": {"type": "object"}}
USE = {"name": "get", "input_schema": {"type": "object"}}


async def check(attacked, cases, routes=BOTH, status=400):
    """Each case on each route, streamed and not, is refused naming its parameter, or served where that is `OK`."""
    wrong = []
    for fields, param in cases:
        for route in routes:
            for stream in (False, True):
                body = {"model": "tiny", "stream": stream} | BODIES[route] | fields
                response = await attacked.client.post(route, json=body)
                problem = served(response) if param == OK else refused(response, route, status, param)
                if problem:
                    wrong.append((route, stream, str(fields)[:120], param, problem))
    assert not wrong, "\n".join(map(str, wrong))


def served(response):
    failed = response.status_code != 200 or "event: error" in response.text or '"status":"failed"' in response.text
    return f"{response.status_code} {response.text[:300]}" if failed else None


def refused(response, route, status, param):
    if response.status_code != status:
        return f"{response.status_code} {response.text[:300]}"
    body = response.json()
    if route == MESSAGES:
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        right = set(body) == {"type", "error"} and body["type"] == "error"
        right = right and set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
        right = right and len(body["error"]["message"]) <= 512 and (param is None or param in body["error"]["message"])
        return None if right and response.headers["request-id"] else f"shape {body}"
    error = body["error"]
    if set(body) != set(ErrorBody.__struct_fields__) or set(error) != {"message", "type", "param", "code"}:
        return f"shape {body}"
    return None if error["param"] == param and isinstance(error["code"], str) else f"param {error}"


async def test_B1_B2_B3_a_number_out_of_range_is_refused_by_name(tiny_engine):
    cases = [({name: value}, name) for name in ("temperature", "top_p", "min_p") for value in (-0.1, 9, "1", True, [])]
    cases += [({"top_k": value}, "top_k") for value in (-2, 1.5, "1", True, 2**53 + 1)]
    cases += [({"seed": value}, "seed") for value in (1.5, "1", True, 2**70)]
    cases += [({"priority": 2**53 + 1}, "priority"), ({"repetition_penalty": 0}, "repetition_penalty")]
    cases += [({"queue_timeout": 0}, "queue_timeout"), ({"cache_salt": ""}, "cache_salt")]
    cases += [
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"stream": "yes"}, "stream"),
        ({"min_tokens": 3}, "min_tokens"),
    ]
    cases += [({name: None}, OK) for name in ("temperature", "top_p", "top_k", "seed", "stream", "tools", "metadata")]
    cases += [({"temperature": value}, OK) for value in (0, -0.0, 1e-320, 1)]
    limit = ("max_output_tokens", "max_tokens")
    wrong = (0, -1, 1.5, 1.0, "10", True, [], 2**70)
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, cases)
        for route, name in zip(BOTH, limit, strict=True):
            await check(attacked, [({name: value}, name) for value in wrong], [route])
        await check(attacked, [({"max_output_tokens": None, "ignore_eos": False}, OK)], [RESPONSES])
        await check(attacked, [({"max_tokens": None}, "max_tokens")], [MESSAGES])
        await check(attacked, [({"max_tokens": 2**62}, "max_tokens")], [MESSAGES])


async def test_B4_a_wrong_number_of_top_logprobs_is_refused(tiny_engine):
    cases = [({"top_logprobs": value}, "top_logprobs") for value in (-1, 21, 10**9, 1.5, "1", True)]
    cases += [({"top_logprobs": value}, OK) for value in (0, 20, None)]
    cases += [({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}, OK)]
    cases += [
        ({"include": ["everything"]}, "include[0]"),
        ({"include": "x"}, "include"),
        ({"logprobs": True}, "logprobs"),
    ]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, cases, [RESPONSES])


async def test_B7_a_wrong_stop_sequence_is_refused(tiny_engine):
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for route, name in ((RESPONSES, "stop"), (MESSAGES, "stop_sequences")):
            wrong = ([""], ["x"] * 10_000, ["x" * 2**20], 5, [5])
            cases = [({name: value}, f"{name}[0]" if value == [5] else name) for value in wrong]
            await check(attacked, [*cases, ({name: ["x", "yz"]}, OK), ({name: None}, OK)], [route])


async def test_B6_B8_a_wrong_input_item_is_refused_by_its_path(tiny_engine):
    image = {"type": "input_image", "image_url": "https://localhost/x.png"}
    cases = [
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [image]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, OK),
        ({"input": [{"type": "nonsense\n" * 99}]}, OK),
        ({"input": [{"type": "item_reference", "id": "msg_" + "0" * 36}]}, OK),
        ({"input": [{"role": "user", "content": "x"}] * 10_001}, "input"),
        ({"input": [], "instructions": 5}, "instructions"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"previous_response_id": "x" * 129}, "previous_response_id"),
        ({"previous_response_id": "../../etc/passwd\0"}, "previous_response_id"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"user": "x" * 513}, "user"),
        ({"background": True, "store": False}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"truncation": "yes"}, "truncation"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
    ]
    unsupported = ("prompt", "messages", "max_tokens", "response_format", "moderation")
    cases += [({name: {"id": "x"}}, name) for name in unsupported] + [({"n": 2}, "n")]
    cases += [
        ({"input": given}, OK) for given in ("", [], None, "\U0001f600 \u0000", [{"role": "user", "content": ""}])
    ]
    cases += [({"instructions": "", "metadata": {}, "user": "\u202e", "service_tier": "flex", "n": 1}, OK)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, cases, [RESPONSES])


async def test_B8_a_wrong_message_or_block_is_refused_by_its_path(tiny_engine):
    def blocks(*given):
        return {"messages": [{"role": "user", "content": list(given)}]}

    cases = [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "messages"),
        (blocks({"type": "image", "source": {}}), "messages[0].content[0]"),
        (blocks({"type": "text", "text": 5}), "messages[0].content[0].text"),
        (blocks({"type": "tool_result", "tool_use_id": "t"}), OK),
        (blocks(5), "messages[0].content"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ]
    cases += [({"system": given}, OK) for given in (None, "", [], [{"type": "text", "text": "x", "cache_control": {}}])]
    cases += [(blocks(), OK), (blocks({"type": "text", "text": ""}), OK), ({"service_tier": "auto"}, OK)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, cases, [MESSAGES])
        for body in ({"messages": []}, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}):
            response = await attacked.client.post(f"{MESSAGES}/count_tokens", json={"model": "tiny"} | body)
            assert refused(response, MESSAGES, 400, "messages") is None


async def test_B11_a_wrong_tool_or_choice_is_refused_by_its_path(tiny_engine):
    cases = [
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": 5}, "tools"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "get"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "put"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    ]
    group = {"type": "namespace", "name": "x"}
    cases += [
        ({"tools": [group]}, "tools[0].tools"),
        ({"tools": [group | {"tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [group | {"tools": [TOOL], "name": "a b"}]}, "tools[0].tools[0].name"),
        ({"tools": [group | {"tools": [TOOL], "name": "x" * 2**20}]}, OK),
        ({"tools": [group | {"tools": [TOOL, TOOL]}]}, OK),
        ({"tools": [TOOL | {"name": "x__get"}, group | {"tools": [TOOL]}]}, OK),
        ({"tools": [group | {"tools": [TOOL | {"parameters": 5}]}]}, "tools[0].tools[0].parameters"),
        ({"tools": [group | {"tools": [TOOL] * 1_000}]}, OK),
        ({"tools": [group | {"tools": [TOOL | {"name": f"get_{number}"} for number in range(1_100)]}]}, OK),
        ({"tools": [TOOL | {"name": f"get_{number}"} for number in range(1_025)]}, "tools"),
        ({"tools": [group | {"tools": [TOOL], "description": "y"}]}, OK),
    ]
    skipped = [{"type": kind} for kind in ("web_search", "image_generation\r\nx: y", "x" * 2**20)]
    skipped.append(group | {"tools": []})
    cases += [({"tools": skipped}, OK), ({"tools": []}, OK), ({"tool_choice": "none"}, OK)]
    uses = [
        ({"tools": [{"name": "get"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": 5}, "tools"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [USE], "tool_choice": {"type": "tool", "name": "put"}}, "tool_choice.name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, OK),
        ({"tools": [], "tool_choice": {"type": "none"}}, OK),
    ]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, cases, [RESPONSES])
        await check(attacked, uses, [MESSAGES])


async def test_B12_an_unknown_model_is_not_found(tiny_engine):
    cases = [({"model": name}, "model") for name in ("nobody", "../../x", "\0", "x" * 2**20)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check(attacked, cases, status=404)


async def test_B13_an_unknown_response_id_is_not_found(tiny_engine):
    """Ids in a path are only compared."""
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for name in ("resp_none", "%00", "%F0%9F%98%80", "'%20OR%201=1--", "x" * 512, "%ff"):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                response = await attacked.client.request(method, f"{RESPONSES}/{name}{path}")
                assert response.status_code == 404, (method, name, response.text)
                assert response.json()["error"]["code"] == "response_not_found"
        body = {"model": "tiny", "background": True, "stream": True} | BODIES[RESPONSES]
        events = (await attacked.client.post(RESPONSES, json=body)).text
        name = "resp_" + events.partition('"id":"resp_')[2][:32]
        numbers = [f"stream=true&starting_after={number}" for number in (2**31, 2**63 - 1, 2**63, 2**70, -(2**70))]
        for query in ("stream=perhaps", "starting_after=-1", "starting_after=1&starting_after=2", *numbers):
            response = await attacked.client.get(f"{RESPONSES}/{name}?{query}")
            assert response.status_code == 400, response.text
        last = await attacked.client.get(f"{RESPONSES}/{name}?stream=true&starting_after={2**31 - 1}")
        assert last.status_code == 200


async def test_A1_A2_a_body_that_is_no_object_is_refused(tiny_engine):
    wrong = [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"model": "tiny", "max_tokens": NaN}',
        b'{"a": 1, "a": 2}',
        b"\xff",
        b"[" * 10**5,
    ]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for route in (*BOTH, f"{MESSAGES}/count_tokens", f"{RESPONSES}/input_tokens"):
            for raw in wrong:
                response = await attacked.client.post(route, content=raw, headers={"content-type": "application/json"})
                assert response.status_code == 400, (route, raw[:20], response.text)
                assert ("type" in response.json()) == route.startswith(MESSAGES)
            response = await attacked.client.post(route, content=json.dumps(BODIES[RESPONSES]))
            assert response.status_code == 415
