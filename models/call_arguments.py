"""Arguments of past tool calls as chat templates read them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


class CallArguments(dict[str, Any]):
    """An object that prints as JSON, since some templates print it as it is and others turn it into JSON themselves."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The messages with the arguments of calls as texts, for templates that add them to texts; None without any."""
    found = False
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            changed.append(message)
            continue
        plain = []
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), CallArguments):
                found = True
                plain.append({**call, "function": {**function, "arguments": str(function["arguments"])}})
            else:
                plain.append(call)
        changed.append({**message, "tool_calls": plain})
    return changed if found else None
