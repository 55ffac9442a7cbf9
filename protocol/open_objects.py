"""JSON schemas of objects that come in many kinds, some of which are unknown: what the API's description says of them.

They are decoded as plain objects, because items may leave out their type and kinds that are not known may be skipped.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

_TEXT: dict[str, Any] = {"type": "string"}
_FREE: dict[str, Any] = {"type": "object"}


def _kind(name: str, needed: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": name}, **needed, **(more or {})},
        "required": ["type", *needed],
    }


def _either(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(kinds)}


def _list_of(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": _either(*kinds) if len(kinds) > 1 else kinds[0]}


Refused = Annotated[Any, Meta(description="Not supported: refused when given.", extra_json_schema={"type": "null"})]

# Anthropic's.

_TEXT_BLOCK = _kind("text", {"text": _TEXT})
_TEXTS = _either(_TEXT, _list_of(_TEXT_BLOCK))
_BLOCKS = _either(
    _TEXT_BLOCK,
    _kind("thinking", {"thinking": _TEXT, "signature": _TEXT}),
    _kind("redacted_thinking", {"data": _TEXT}),
    _kind("tool_use", {"id": _TEXT, "name": _TEXT, "input": _FREE}),
    _kind("tool_result", {"tool_use_id": _TEXT}, {"content": _TEXTS, "is_error": {"type": "boolean"}}),
)
Block = Annotated[dict[str, Any], Meta(extra_json_schema=_BLOCKS)]
"""A content block: text, thinking, tool_use or tool_result."""
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
            _kind("web_search_20250305", {"name": _TEXT}),
        )
    ),
]
"""A tool of the client's own; those of other types are skipped."""

# OpenAI's.

_PARTS = _either(_TEXT, _list_of(_kind("input_text", {"text": _TEXT}), _kind("output_text", {"text": _TEXT})))
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
    _kind("reasoning", {"summary": _list_of(_kind("summary_text", {"text": _TEXT}))}),
    _kind("function_call", {"call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}),
    _kind("function_call_output", {"call_id": _TEXT, "output": _PARTS}),
    _kind("item_reference", {"id": _TEXT}),
)
InputItem = Annotated[dict[str, Any], Meta(extra_json_schema=_ITEMS)]
"""An input item: a message, reasoning, a function call or its output, or a reference to an item that is kept."""
ResponseTool = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema=_either(
            _kind(
                "function",
                {"name": _TEXT},
                {"description": _TEXT, "parameters": _FREE, "strict": {"type": "boolean"}},
            ),
            _kind("web_search", {}),
        )
    ),
]
"""A function; tools of other types are skipped."""
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
