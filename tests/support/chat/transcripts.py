"""Conversations that other servers and clients have begun, for each API, and the prompts that they become."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from troupellm.models.chat_template.template import ChatTemplate
from troupellm.protocol.api.anthropic import MessagesRequest
from troupellm.protocol.api.chat import ChatRequest
from troupellm.protocol.api.responses import ResponsesRequest
from troupellm.server.messages.translate import translate as translate_messages
from troupellm.server.openai.chat_turn import tool_use_of
from troupellm.server.openai.past_messages import plain_messages
from troupellm.server.responses.items import as_items
from troupellm.server.responses.sealed import sealed
from troupellm.server.responses.translate import translate as translate_response

Entries = list[dict[str, Any]]
TOOL = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
BODIES: Mapping[str, dict[str, Any]] = {
    "chat": {"tools": [{"type": "function", "function": TOOL}]},
    "responses": {"tools": [{"type": "function", **TOOL}]},
    "messages": {"max_tokens": 9, "tools": [{"name": "look", "input_schema": TOOL["parameters"]}]},
}
FIELD = {"chat": "messages", "responses": "input", "messages": "messages"}
PATH = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def chat_of(api: str, entries: Entries, **more: Any) -> tuple[ChatRequest, list[str]]:
    """The chat request that a conversation becomes, and the names of its skipped parts.

    Raises:
        InvalidRequest: the conversation is refused.
    """
    body = BODIES[api] | {FIELD[api]: entries} | more
    if api == "chat":
        return msgspec.convert(body, ChatRequest), []
    if api == "responses":
        request = msgspec.convert(body, ResponsesRequest)
        made = translate_response(request, as_items(request.input))
        return made.chat, made.skipped
    translated = translate_messages(msgspec.convert(body, MessagesRequest), switches=(), thinks=False)
    return translated.chat, translated.skipped


def prompt_of(template: ChatTemplate, api: str, entries: Entries, **more: Any) -> tuple[str, list[str]]:
    """The prompt of a conversation, and the names of its skipped parts.

    Raises:
        InvalidRequest: the conversation is refused.
    """
    request, skipped = chat_of(api, entries, **more)
    plain = plain_messages(request.messages)
    going_on = bool(request.continue_final_message)
    text = template.render(
        plain.messages,
        tool_use_of(request).tools,
        add_generation_prompt=not going_on,
        continue_final_message=going_on,
    )
    return text, [*skipped, *plain.skipped]


def user(text: str = "question") -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str = "answer") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(arguments: Any, **more: Any) -> dict[str, Any]:
    return answer("") | {
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}} | more
        ]
    }


def _result(content: Any = "found", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content} | more


_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
_SOUND = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
_LEGACY = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
_CUSTOM = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": "x"}}
_CODE = {"type": "function", "function": {"name": "look", "arguments": "{"}}

CHAT_KINDS: Mapping[str, Entries] = {
    "arguments are an object": [_call({"a": "x"}), _result()],
    "arguments are empty": [_call(""), _result()],
    "arguments are null": [_call(None), _result()],
    "arguments are no JSON": [_call('{"a": '), _result()],
    "arguments are a list": [_call([1, 2]), _result()],
    "arguments are the text of a number": [_call("5"), _result()],
    "result without a call": [_result(tool_call_id="other")],
    "call without an id": [answer("") | {"tool_calls": [_CODE]}, {"role": "tool", "content": "found"}],
    "calls of one answer": [
        answer("") | {"tool_calls": [_CODE | {"id": "a"}, _CODE | {"id": "b"}]},
        *[_result(tool_call_id=name) for name in "ba"],
    ],
    "call without a result": [_call("{}")],
    "image in a result": [_call("{}"), _result([_IMAGE, {"type": "text", "text": "seen"}])],
    "image of the user": [user() | {"content": [_IMAGE, _SOUND, {"type": "text", "text": "look"}]}, answer()],
    "users in a row": [user("one"), user("two")],
    "system later": [{"role": "system", "content": "late"}],
    "developer later": [{"role": "developer", "content": [{"type": "text", "text": "late"}]}],
    "half of a pair": [user("a\ud83db"), answer("\ude00"), _call('{"a": "\\ud83d"}'), _result("\ud83d")],
    "function call of old": [_LEGACY, {"role": "function", "name": "look", "content": "found"}],
    "custom call": [answer("") | {"tool_calls": [_CUSTOM]}, _result()],
    "unknown call": [answer("") | {"tool_calls": [{"type": "strange"}, 5]}],
    "spoken answer": [answer() | {"content": None, "audio": {"id": "audio_1"}}],
    "refusal": [answer() | {"content": None, "refusal": "no"}],
    "parts of other APIs": [answer() | {"content": [{"type": "output_text", "text": "so"}, {"type": "odd"}, 5]}],
    "content is a number": [answer() | {"content": 5, "reasoning": ["why"], "name": 7}],
    "unknown role": [{"role": "wizard", "content": "x"}, answer()],
    "reasoning": [answer() | {"reasoning_content": "why"}],
    "reasoning as a part": [
        answer()
        | {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "why"}]},
                {"type": "text", "text": "so"},
            ]
        }
    ],
}


def _item(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


def _pair(call: dict[str, Any], kind: str, /, **more: Any) -> Entries:
    return [call, _item(kind, call_id="c", **more)]


RESPONSES_KINDS: Mapping[str, Entries] = {
    "function call": _pair(_item("function_call", call_id="c", name="look", arguments=""), "function_call_output"),
    "arguments are an object": [_item("function_call", call_id="c", name="look", arguments={"a": "x"})],
    "arguments are no JSON": [_item("function_call", call_id="c", name="look", arguments="no JSON")],
    "call without a name": [_item("function_call", call_id="c")],
    "output without a call": [_item("function_call_output", call_id="other", output="found")],
    "call without an id": [_item("function_call", name="look"), _item("function_call_output", output="found")],
    "image in an output": _pair(
        _item("function_call", call_id="c", name="look", arguments="{}"),
        "function_call_output",
        output=[_item("input_image", image_url="x"), _item("input_text", text="seen")],
    ),
    "image of the user": [user() | {"content": [_item("input_image", image_url="x")]}, answer()],
    "developer later": [{"role": "developer", "content": "late"}],
    "reasoning": [_item("reasoning", id="rs", summary=[], content=[_item("reasoning_text", text="why")])],
    "reasoning of ours": [_item("reasoning", summary=[], content=None, encrypted_content=sealed("why"))],
    "reasoning of a summary": [_item("reasoning", summary=[_item("summary_text", text="why")], encrypted_content="g")],
    "reasoning of others": [_item("reasoning", id="rs", summary=[], encrypted_content="gAAAAB")],
    "reasoning that is damaged": [_item("reasoning", summary=None, encrypted_content="trp1.AAAA")],
    "agent reasoning": [_item("agent_reasoning", text="why")],
    "half of a pair": [
        user("\ud83d"),
        _item("message", role="assistant", content=[_item("output_text", text="\ude00")]),
    ],
    "additional tools": [_item("additional_tools", tools=[{"type": "function", **TOOL, "name": "further"}, 5, {}])],
    "tool search": _pair(
        _item("tool_search_call", call_id="c", arguments={"query": "x"}),
        "tool_search_output",
        tools=[{"type": "function", **TOOL, "name": "found_one"}],
    ),
    "configuration": [_item("configuration_update", reasoning={"effort": "low"}, text={"format": {"type": "text"}})],
    "wrong configuration": [_item("configuration_update", reasoning={"effort": 5}, text={"format": {"type": "xml"}})],
    "agent message": [
        _item("agent_message", author="a", recipient="b", content=[_item("input_text", text="x")]),
        _item("agent_message", content=[_item("encrypted_content", encrypted_content="plain")]),
        _item("agent_message", content=[_item("encrypted_content", encrypted_content="gAAAAx")]),
    ],
    "custom call": _pair(
        _item("custom_tool_call", call_id="c", name="patch", input="x"), "custom_tool_call_output", output="ok"
    ),
    "local shell call": [
        _item("local_shell_call", id="l", call_id="c", action={"command": ["ls"]}),
        _item("local_shell_call_output", id="c", output="a"),
    ],
    "shell call": _pair(
        _item("shell_call", call_id="c", action={"commands": ["ls"]}),
        "shell_call_output",
        output=[{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    ),
    "apply patch call": _pair(
        _item("apply_patch_call", call_id="c", operation={"type": "delete_file", "path": "x"}),
        "apply_patch_call_output",
        status="completed",
    ),
    "mcp call": [_item("mcp_call", id="m", name="search", arguments="{}", output="found", server_label="docs")],
    "compaction of ours": [_item("compaction", encrypted_content=sealed("much was said"))],
    "compaction of others": [_item(name, encrypted_content="gAAAAx") for name in ("compaction", "context_compaction")],
    "hosted tools": [
        _item(name, id="x")
        for name in ("web_search_call", "image_generation_call", "mcp_approval_request", "program", "ghost_snapshot")
    ],
    "unknown": [_item("brand_new", data=[1, 2])],
    "unknown with a text": [_item("brand_new", role="user", content="hear me")],
    "reference to nothing": [{"id": "msg_gone"}],
    "unknown role": [{"role": "critic", "content": "x"}, answer()],
}


def _use(**more: Any) -> dict[str, Any]:
    return answer() | {"content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"a": "x"}} | more]}


def _told(content: Any = "found", **more: Any) -> dict[str, Any]:
    return user() | {"content": [{"type": "tool_result", "tool_use_id": "t", "content": content} | more]}


_PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
_PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}

MESSAGES_KINDS: Mapping[str, Entries] = {
    "tool use": [_use(), _told()],
    "input is a text": [_use(input="no object"), _told()],
    "input is null": [_use(input=None), _told(None)],
    "result without a use": [_told(tool_use_id="other")],
    "use without an id": [_use(id=None), _told(tool_use_id=None)],
    "image in a result": [_use(), _told([_PICTURE, _PDF, {"type": "text", "text": "seen"}])],
    "image of the user": [user() | {"content": [_PICTURE]}, answer()],
    "system later": [{"role": "system", "content": "late"}],
    "half of a pair": [user("\ud83d"), answer("\ude00")],
    "redacted thinking": [answer() | {"content": [{"type": "redacted_thinking", "data": "x"}]}],
    "thinking": [answer() | {"content": [{"type": "thinking", "thinking": "why", "signature": "x"}]}],
    "tool addition": [
        {
            "role": "system",
            "content": [
                {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "further"}}},
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}},
            ],
        }
    ],
    "mcp tool use": [
        answer()
        | {
            "content": [
                {"type": "mcp_tool_use", "id": "m", "name": "search", "server_name": "docs", "input": {}},
                {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "found"}]},
                {"type": "text", "text": "so"},
            ]
        }
    ],
    "hosted tool": [
        answer() | {"content": [{"type": "server_tool_use", "id": "s"}, {"type": "web_search_tool_result"}]}
    ],
    "compaction": [answer() | {"content": [{"type": "compaction", "content": "much was said"}]}],
    "compaction that is empty": [answer() | {"content": [{"type": "compaction", "content": None}]}],
    "unknown block": [answer() | {"content": [{"type": "brand_new"}, 5, {}]}],
    "no content": [answer() | {"content": None}, user(), answer() | {"content": []}],
    "unknown role": [{"role": "tool", "content": "x"}, answer()],
}
ALL_KINDS = {"chat": CHAT_KINDS, "responses": RESPONSES_KINDS, "messages": MESSAGES_KINDS}


def random_transcript(api: str, seed: int) -> Entries:
    """Kinds in any order, cut anywhere, that a question ends."""
    draw = random.Random(seed)
    entries: Entries = []
    makers: list[Callable[[], Entries]] = [
        lambda: [user()],
        lambda: [answer()],
        lambda: draw.choice(list(ALL_KINDS[api].values())),
    ]
    for _ in range(draw.randrange(12)):
        entries += draw.choices(makers, [1, 1, 4])[0]()
    entries = entries[draw.randrange(3) :]
    if draw.random() < 0.3 and entries:
        del entries[draw.randrange(len(entries))]
    return [*entries, user("What now?")]
