"""Calls and their outputs, as items of the responses API have them, for every kind of tool."""

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from troupellm.server.openai.past_messages import past_texts
from troupellm.server.responses.namespaces import flat_name

CALLS: Final[Mapping[str, tuple[str, str]]] = {
    "function_call": ("", "arguments"),
    "custom_tool_call": ("", "input"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
    "mcp_call": ("", "arguments"),
}
"""By the type of an item: the tool's name, where the item does not give it, and the field of the arguments."""
TOOL_SEARCH_OUTPUT: Final = "tool_search_output"
OUTPUTS: Final = frozenset(
    {"function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output"}
    | {"apply_patch_call_output", "mcp_call_output", "mcp_tool_call_output", TOOL_SEARCH_OUTPUT}
)

Item = Mapping[str, Any]


class PastOutput(msgspec.Struct, frozen=True):
    text: str
    skipped: list[str]
    """Types of its parts that are not shown as they are."""


def past_call(item: Item, kind: str) -> dict[str, Any]:
    """A tool call of a chat. A name or an id that is not there is left out."""
    name, field = CALLS[kind]
    given = item.get("name")
    name = given if isinstance(given, str) and given else name
    namespace = item.get("namespace")
    if isinstance(namespace, str) and namespace:
        name = flat_name(namespace, name)
    arguments = item.get(field)
    if kind == "custom_tool_call":
        arguments = {"input": arguments}
    if isinstance(arguments, Mapping):
        arguments = msgspec.json.encode(arguments).decode()
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    call_id = item.get("call_id") or item.get("id")
    return {"id": call_id, **call} if isinstance(call_id, str) else call


def call_id_of(item: Item, kind: str) -> str | None:
    """The id of the call that an output answers."""
    names = ("call_id", "id") if kind == "local_shell_call_output" else ("call_id",)
    return next((item[name] for name in names if isinstance(item.get(name), str)), None)


def past_output(item: Item, kind: str) -> PastOutput:
    """The text of an output for the model."""
    if kind == TOOL_SEARCH_OUTPUT:
        tools = item.get("tools")
        names = [one.get("name") for one in tools if isinstance(one, Mapping)] if isinstance(tools, list) else []
        return PastOutput(f"Tools found: {', '.join([name for name in names if isinstance(name, str)]) or 'none'}", [])
    if kind == "mcp_call":
        given = item["output"] if item.get("output") is not None else item.get("error")
    else:
        given = item.get("output")
        if given is None:
            given = item.get("status")
    if isinstance(given, Mapping):
        given = given.get("content", given)
    if isinstance(given, str):
        return PastOutput(given, [])
    if kind == "shell_call_output" and isinstance(given, list):
        return PastOutput("\n".join([_of_command(one) for one in given]), [])
    if isinstance(given, list):
        found = past_texts(given)
        return PastOutput("\n".join(found.texts), found.skipped)
    return PastOutput("" if given is None else json.dumps(given, ensure_ascii=False), [])


def _of_command(one: object) -> str:
    if not isinstance(one, Mapping):
        return str(one)
    texts = [one[name] for name in ("stdout", "stderr") if isinstance(one.get(name), str) and one[name]]
    outcome = one.get("outcome")
    if isinstance(outcome, Mapping):
        code = outcome.get("exit_code")
        texts.append(str(outcome.get("type")) if code is None else f"exit code {code}")
    return "\n".join(texts)
