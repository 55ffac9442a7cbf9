"""Agents' hints about the KV cache reach the engine from API processes, and each of them knows the others' sessions."""

import json
from functools import partial
from typing import Any

import pytest

from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.tests.support.servers.fronts import Fronts, fronts_process, until
from troupellm.tests.support.servers.processes import ON_A_THREAD
from troupellm.tests.support.servers.serving import http_request

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

RULES = " ".join(f"Rule {number}: keep the style." for number in range(20))
FLAGS = (*ON_A_THREAD, "--kv-cache-memory-bytes", str(8 * 2**20), "--api-key", "one", "two")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
DELETE = (
    b"DELETE /v1/kv/sessions/s HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer one\r\nconnection: close\r\n\r\n"
)


async def ask(fronts: Fronts, pid: int, path: str, fields: dict[str, Any], **headers: str) -> tuple[int, Any]:
    """Status and body of one process's answer to a request of the key `one`, unless `headers` name another one."""
    given = {"authorization": "Bearer one", "connection": "close"} | headers
    with await fronts.connect(pid, http_request(path, fields, **given)) as connection:
        whole = await connection.read_all(60)
    head, _, body = whole.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def chat(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 2, "messages": [{"role": "user", "content": RULES}]} | fields


async def leased(fronts: Fronts, pid: int) -> float:
    return await fronts.metric(pid, "troupellm_kv_leased_blocks")


async def test_marks_sessions_and_calls_lease_blocks_over_api_processes():
    system = [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    async with fronts_process(BUILTIN_FOLDER, *FLAGS) as fronts:
        first, second = fronts.pids
        fronts.key = "one"
        answer = await ask(
            fronts, first, "/v1/messages", chat(system=system, messages=[{"role": "user", "content": "Hi"}])
        )
        assert answer[0] == 200, answer
        for pid in (first, second):
            await until(partial(leased, fronts, pid))

        for number, named in enumerate(({"x_session_id": "s"}, {"thread_id": "s"}, {"x_claude_code_session_id": "s"})):
            name, other = (first, second) if number % 2 else (second, first)
            assert (await ask(fronts, name, "/v1/chat/completions", chat(), **named))[0] == 200
            refused = await ask(fronts, other, "/v1/kv/sessions/s/prefetch", {}, authorization="Bearer two")
            assert (refused[0], refused[1]["error"]["code"]) == (404, "session_not_found")
            status, found = await ask(fronts, other, "/v1/kv/sessions/s/prefetch", {})
            assert status == 200, found
            assert found["present_blocks"] > 0
            with await fronts.connect(name, DELETE) as connection:
                dropped = json.loads((await connection.read_all()).partition(b"\r\n\r\n")[2])
            assert dropped["evicted_first"] == found["present_blocks"]

        before = await leased(fronts, second)
        called = chat(tools=[TOOL], tool_choice="required", prompt_cache_key="calls", max_tokens=200, temperature=0)
        status, answer = await ask(fronts, second, "/v1/chat/completions", called)
        assert status == 200, answer
        assert answer["choices"][0]["finish_reason"] == "tool_calls"

        async def more() -> bool:
            return await leased(fronts, first) > before

        await until(more)
        again = chat(
            messages=[*called["messages"], answer["choices"][0]["message"], {"role": "user", "content": "On."}]
        )
        status, answer = await ask(fronts, first, "/v1/chat/completions", again | {"prompt_cache_key": "calls"})
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
