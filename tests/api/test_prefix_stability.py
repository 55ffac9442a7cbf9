"""The next turn of a coding agent's session finds the prompt of the turn before in the prefix cache, although its
client sends the tools in another order, another date and another accounting line."""

import random

import pytest

from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

RULES = " ".join(f"Rule {number}: read the file before you change it, and keep its style." for number in range(30))
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [(f"tool_{letter}", f"Does {letter} with a file.") for letter in "qwertyuiop"]
PART = 0.95


def shuffled(seed, form):
    tools = [form(name, about) for name, about in TOOLS]
    random.Random(seed).shuffle(tools)
    return tools


def nested(name, about):
    return {"type": "function", "function": {"name": name, "description": about, "parameters": SCHEMA}}


def flat(name, about):
    return {"type": "function", "name": name, "description": about, "parameters": SCHEMA}


def anthropic(name, about):
    return {"name": name, "description": about, "input_schema": SCHEMA}


def claude_code(turn):
    line = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn}a7f0;"
    body = {
        "max_tokens": 1,
        "metadata": {"user_id": "user_1_session_1"},
        "system": [{"type": "text", "text": line}, {"type": "text", "text": f"Claude. {RULES}"}],
        "tools": shuffled(turn, anthropic),
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Fix the test."}]}],
    }
    use = {"type": "tool_use", "id": "toolu_1", "name": "tool_q", "input": {"path": "a.py"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1 + 1"}
    if turn:
        body["messages"] += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return "/v1/messages", body, {}


def mimic(turn):
    system = f"x-anthropic-billing-header: cch={turn};\nMimic. {RULES}"
    return chat(turn, system, {"x-claude-code-session-id": "mimic"})


def opencode(turn):
    return chat(turn, f"Opencode. {RULES}", {"x-session-affinity": "opencode"})


def pi(turn):
    return chat(turn, f"Pi.\nToday's date: 2026-11-{turn + 10}\n{RULES}", {"x-session-affinity": "pi"})


def nameless(turn):
    return chat(turn, f"Nameless. {RULES}", {})


def chat(turn, system, headers):
    body = {
        "max_tokens": 1,
        "tools": shuffled(turn, nested),
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Fix the test."}],
    }
    call = {"id": "call_1", "type": "function", "function": {"name": "tool_q", "arguments": '{"path": "a.py"}'}}
    if turn:
        body["messages"] += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "1 + 1"},
        ]
    return "/v1/chat/completions", body, headers


def codex(turn):
    body = {
        "max_output_tokens": 1,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "codex",
        "instructions": f"Codex. {RULES}",
        "tools": shuffled(turn, flat),
        "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Fix the test."}],
    }
    if turn:
        body["input"] += [
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"},
            {"type": "function_call", "call_id": "c", "name": "tool_q", "arguments": '{"path": "a.py"}'},
            {"type": "function_call_output", "call_id": "c", "output": "1 + 1"},
            {"role": "developer", "content": "Go on."},
        ]
    return "/v1/responses", body, {"session_id": "codex"}


def usage_of(body):
    """Tokens of the prompt, and those of them that were cached."""
    usage = body["usage"]
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return usage.get("prompt_tokens", usage.get("input_tokens")), details["cached_tokens"]


async def test_the_next_turn_finds_the_prompt_of_the_turn_before(builtin_engine, tmp_path):
    """Each client changes the order of its tools, and a line of its system prompt."""
    lines = tmp_path / "lines.txt"
    lines.write_text("Today's date: .*\n")
    async with (
        builtin_engine(kv_cache_memory_bytes=32 * 2**20) as engine,
        running_server(engine, server_config(volatile_lines=str(lines))) as served,
        served.client() as client,
    ):
        found = {}
        for make in (claude_code, mimic, opencode, pi, codex, nameless):
            counts = []
            for turn in range(2):
                path, body, headers = make(turn)
                body["model"] = "troupe-builtin"
                response = await client.post(path, json=body, headers=headers)
                assert response.status_code == 200, response.text
                counts.append(usage_of(response.json()))
            found[make.__name__] = counts[1][1] / counts[0][0]
    assert found.pop("nameless") < PART, "the order of the tools is the client's where it names no session"
    assert all(part >= PART for part in found.values()), found
