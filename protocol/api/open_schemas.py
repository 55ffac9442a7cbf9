"""JSON schemas of objects that come in many kinds, some of which are unknown: what the API's description says of them.

They are decoded as plain objects, because items may leave out their type and kinds that are not known may be skipped.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from msgspec import Meta

SKIPPED_BLOCKS = frozenset({"server_tool_use", "redacted_thinking", "container_upload"})
"""Blocks that the tools and the reasoning of another server left in a conversation with Anthropic's API: none of
them can be read here."""
SKIPPED_ITEMS = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"}
    | {"computer_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "program"}
    | {"program_output", "ghost_snapshot"}
)
"""The same in a conversation with the responses API; the tools are not here either. Items of unknown types are skipped
likewise, unless they have a role and a text."""
_SUMMARIES = ("compaction", "compaction_summary", "context_compaction")

_TEXT: dict[str, Any] = {"type": "string"}
_NAME: dict[str, Any] = {"type": "string", "minLength": 1}
_FREE: dict[str, Any] = {"type": "object"}


def _kind(name: str, needed: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": name}, **needed, **(more or {})},
        "required": ["type", *needed],
    }


def _of_kinds(names: Iterable[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"enum": sorted(names)}}, "required": ["type"]}


def _other_than(*names: str) -> dict[str, Any]:
    kind = {"type": "string", "not": {"enum": list(names)}}
    return {"type": "object", "properties": {"type": kind}, "required": ["type"]}


def _either(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(kinds)}


def _list_of(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": _either(*kinds) if len(kinds) > 1 else kinds[0]}


Refused = Annotated[Any, Meta(description="Not supported: refused when given.", extra_json_schema={"type": "null"})]

_MAYBE_TEXT = _either(_TEXT, {"type": "null"})

# Of chats. The server reads past messages itself, because any server or client may have written them.

_CHAT_PART = {
    "type": "object",
    "properties": {"type": _TEXT, "text": _MAYBE_TEXT},
    "required": ["type"],
}
_PAST_CALL = {
    "type": "object",
    "properties": {
        "id": _MAYBE_TEXT,
        "type": _TEXT,
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "arguments": _either(_TEXT, _FREE, {"type": "null"})},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
ChatContent = Annotated[Any, Meta(extra_json_schema=_either(_TEXT, _list_of(_CHAT_PART), {"type": "null"}))]
"""A text, or parts of type text; in older messages and in results any parts."""
PastCalls = Annotated[Any, Meta(extra_json_schema=_either(_list_of(_PAST_CALL), {"type": "null"}))]
"""Tool calls of an answer."""
PastFunction = Annotated[Any, Meta(extra_json_schema=_either(_PAST_CALL["properties"]["function"], {"type": "null"}))]
"""The call of an answer in the form that came before tool calls."""
PastSound = Annotated[Any, Meta(extra_json_schema=_either(_FREE, {"type": "null"}))]
"""The spoken form of an answer, of which only its server knows more than the id."""
PastText = Annotated[Any, Meta(extra_json_schema=_MAYBE_TEXT)]

# Anthropic's.

_TEXT_BLOCK = _kind("text", {"text": _TEXT})
_TEXTS = _either(_TEXT, _list_of(_TEXT_BLOCK))
_DOCUMENT = _either(
    _kind("text", {"data": _TEXT}, {"media_type": {"const": "text/plain"}}), _kind("content", {"content": _TEXTS})
)
_RESULTS = _either(_TEXT, _list_of(_TEXT_BLOCK, _kind("tool_reference", {"tool_name": _TEXT})))
_BLOCKS = _either(
    _TEXT_BLOCK,
    _kind("document", {"source": _DOCUMENT}, {"title": _MAYBE_TEXT}),
    _kind("search_result", {"title": _TEXT, "source": _TEXT, "content": _list_of(_TEXT_BLOCK)}),
    _kind("thinking", {"thinking": _TEXT, "signature": _TEXT}),
    _kind("tool_use", {"id": _TEXT, "name": _TEXT, "input": _FREE}),
    _kind("mcp_tool_use", {"id": _TEXT, "name": _TEXT, "input": _FREE}),
    _kind("mcp_tool_result", {"tool_use_id": _TEXT}, {"content": _RESULTS, "is_error": {"type": "boolean"}}),
    _kind("compaction", {"content": _MAYBE_TEXT}),
    _kind("tool_addition", {"tool": _FREE}),
    _kind("tool_removal", {"tool": _FREE}),
    _kind("tool_result", {"tool_use_id": _TEXT}, {"content": _RESULTS, "is_error": {"type": "boolean"}}),
    _of_kinds(SKIPPED_BLOCKS),
)
MESSAGE_CONTENT = _either(_TEXT, _list_of(_BLOCKS))
"""A text, or content blocks; those that only Anthropic's own server can read are skipped."""
SystemBlock = Annotated[dict[str, Any], Meta(extra_json_schema=_TEXT_BLOCK)]
MessageTool = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema=_either(
            {
                "type": "object",
                "properties": {
                    "type": {"const": "custom"},
                    "name": _TEXT,
                    "description": _TEXT,
                    "input_schema": _FREE,
                    "strict": {"type": "boolean"},
                },
                "required": ["name", "input_schema"],
            },
            _other_than("custom"),
        )
    ),
]
"""A tool of the client's own; those of other types are skipped, and named in x-troupellm-skipped."""

# OpenAI's.

_PARTS = _either(
    _TEXT,
    _list_of(
        *(_kind(name, {"text": _TEXT}) for name in ("input_text", "output_text", "text")),
        _kind("refusal", {"refusal": _TEXT}),
    ),
)
_ITEMS = _either(
    {
        "type": "object",
        "properties": {
            "type": {"const": "message"},
            "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": _PARTS,
        },
        "required": ["role", "content"],
    },
    _kind(
        "reasoning",
        {},
        {
            "summary": _list_of(_kind("summary_text", {"text": _TEXT})),
            "content": _either(_list_of(_kind("reasoning_text", {"text": _TEXT})), {"type": "null"}),
            "encrypted_content": _MAYBE_TEXT,
        },
    ),
    *(_kind(name, {"encrypted_content": _MAYBE_TEXT}) for name in _SUMMARIES),
    _kind("agent_reasoning", {"text": _TEXT}),
    _kind("agent_message", {"author": _TEXT, "recipient": _TEXT, "content": _list_of(_FREE)}),
    _kind("additional_tools", {"tools": _list_of(_FREE)}),
    _kind("configuration_update", {}, {"reasoning": _FREE, "text": _FREE}),
    _kind("tool_search_call", {"arguments": _either(_TEXT, _FREE)}, {"call_id": _MAYBE_TEXT}),
    _kind("tool_search_output", {"tools": _list_of(_FREE)}, {"call_id": _MAYBE_TEXT}),
    _kind("shell_call", {"call_id": _TEXT, "action": _FREE}),
    _kind("shell_call_output", {"call_id": _TEXT, "output": _list_of(_FREE)}),
    _kind("apply_patch_call", {"call_id": _TEXT, "operation": _FREE}),
    _kind("apply_patch_call_output", {"call_id": _TEXT}, {"output": _MAYBE_TEXT, "status": _TEXT}),
    _kind("mcp_call", {"id": _TEXT, "name": _TEXT, "arguments": _TEXT}, {"output": _MAYBE_TEXT}),
    _kind("function_call", {"call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}, {"namespace": _MAYBE_TEXT}),
    _kind("function_call_output", {"call_id": _TEXT, "output": _PARTS}),
    _kind("custom_tool_call", {"call_id": _TEXT, "name": _TEXT, "input": _TEXT}, {"namespace": _MAYBE_TEXT}),
    _kind("custom_tool_call_output", {"call_id": _TEXT, "output": _PARTS}),
    _kind("local_shell_call", {"call_id": _TEXT, "action": _FREE}),
    _kind("local_shell_call_output", {"id": _TEXT, "output": _TEXT}),
    _kind("item_reference", {"id": _TEXT}),
    _of_kinds(SKIPPED_ITEMS),
)
_FUNCTION = _kind(
    "function", {"name": _NAME}, {"description": _TEXT, "parameters": _FREE, "strict": {"type": "boolean"}}
)
_NAMESPACE = _kind(
    "namespace", {"name": _NAME, "tools": _list_of(_FUNCTION, _other_than("function"))}, {"description": _TEXT}
)
InputItem = Annotated[dict[str, Any], Meta(extra_json_schema=_ITEMS)]
"""An input item: a message, reasoning, a call or its output, a reference to a kept item, or one that is skipped."""
ResponseTool = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema=_either(
            _FUNCTION,
            _NAMESPACE,
            _other_than("function", "namespace"),
        )
    ),
]
"""A function, or a namespace of functions; tools of other types are skipped, and named in x-troupellm-skipped."""
TextFormat = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema=_either(
            _kind("text", {}),
            _kind("json_object", {}),
            _kind(
                "json_schema",
                {"name": _TEXT, "schema": _FREE},
                {"strict": {"type": "boolean"}, "description": _TEXT},
            ),
        )
    ),
]
JsonFormat = Annotated[dict[str, Any], Meta(extra_json_schema=_kind("json_schema", {"schema": _FREE}))]
