"""Input items of the responses API as chat messages.

Items of one answer (reasoning, text, calls) become one assistant message, which is what chat templates know. Messages
of the system before everything else become one, because few templates take several. Their texts are put together once,
at the end: what a conversation costs is linear in its size, however it is cut into items.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.checks import printable
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.open_objects import SKIPPED_ITEMS
from troupellm.server.responses.namespaces import flat_name

Item = Mapping[str, Any]
Items = list[dict[str, Any]]

MAX_ITEMS = 10_000

_SYSTEM = ("system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


def as_items(given: str | Sequence[Item] | None) -> list[dict[str, Any]]:
    """The items that an input stands for; none and the empty list are an empty message, which probes send.

    Raises:
        InvalidRequest: more than `MAX_ITEMS`.
    """
    if isinstance(given, list) and len(given) > MAX_ITEMS:
        raise InvalidRequest(f"input must have at most {MAX_ITEMS} items, got {len(given)}", param="input")
    if isinstance(given, str) or not given:
        return [{"type": "message", "role": "user", "content": given or ""}]
    return [dict(item) for item in given]


def item_type(item: Item) -> str:
    """Messages may leave it out, and references to other items too."""
    kind = item.get("type")
    if kind is None and "role" not in item and "id" in item:
        return "item_reference"
    return "message" if kind is None else str(kind)


def messages_of(items: Sequence[Item], instructions: str | None, *, first: int = 0) -> list[dict[str, Any]]:
    """Chat messages.

    Args:
        items: what came before and the input, in this order; no references are left in it.
        first: where the input begins in `items`, so that errors count as the client does.

    Raises:
        InvalidRequest: names `input[i]` and what is wrong there.
    """
    transcript = _Transcript(instructions)
    for position, item in enumerate(items):
        transcript.add(item, f"input[{position - first}]" if position >= first else "previous_response_id")
    return transcript.finish()


class _Transcript:
    """Texts that grow are lists of their pieces until `finish`."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calls: set[str] = set()
        if instructions:
            self.messages.append({"role": "system", "content": [instructions]})

    def finish(self) -> list[dict[str, Any]]:
        for message in self.messages:
            separator = "\n\n" if message["role"] == "system" else ""
            for field in ("content", "reasoning_content"):
                if isinstance(pieces := message.get(field), list):
                    message[field] = separator.join(pieces)
        return self.messages

    def add(self, item: Item, here: str) -> None:
        kind = item_type(item)
        if kind == "message":
            self._message(item, here)
        elif kind == "reasoning":
            self._reasoning(item, here)
        elif kind in _CALLS:
            self._call(item, kind, here)
        elif kind in _OUTPUTS:
            self._output(item, here)
        elif kind not in SKIPPED_ITEMS:
            raise InvalidRequest(
                f"{here}: items of type {printable(kind)} are not supported",
                param=f"{here}.type",
                code="unsupported_parameter",
            )

    def _message(self, item: Item, here: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", *_SYSTEM):
            allowed = "user, assistant, system, developer"
            raise InvalidRequest(f"{here}.role must be one of {allowed}", param=f"{here}.role")
        # What was said to the model in parts is told apart, as in chats; an answer's own parts follow on each other.
        text = text_of(item.get("content"), f"{here}.content", separator="" if role == "assistant" else "\n")
        if role == "assistant":
            answer = self._answer()
            if "tool_calls" in answer:
                answer = self._new_answer()
            answer["content"] = answer["content"] or []
            answer["content"].append(text)
        elif role in _SYSTEM and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"].append(text)
        else:
            self.messages.append({"role": "system", "content": [text]} if role in _SYSTEM else _user(text))

    def _reasoning(self, item: Item, here: str) -> None:
        parts = item.get("content") or item.get("summary") or []
        text = text_of(parts, f"{here}.content", separator="\n")
        if not text:
            return
        last = self.messages[-1] if self.messages else None
        fresh = last is None or last["role"] != "assistant" or last["content"] is not None or "tool_calls" in last
        answer = self._new_answer() if fresh else self._answer()
        answer.setdefault("reasoning_content", []).append(text)

    def _call(self, item: Item, kind: str, here: str) -> None:
        name = _text(item.get("name", "local_shell" if kind == "local_shell_call" else None), f"{here}.name")
        if item.get("namespace"):
            name = flat_name(_text(item["namespace"], f"{here}.namespace"), name)
        call_id = _text(item.get("call_id"), f"{here}.call_id")
        arguments = item.get(_CALLS[kind])
        if kind == "function_call":
            arguments = _text(arguments, f"{here}.arguments")
        else:
            given = {"input": arguments} if kind == "custom_tool_call" else arguments
            arguments = msgspec.json.encode(given).decode()
        self._calls.add(call_id)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._answer().setdefault("tool_calls", []).append(call)

    def _output(self, item: Item, here: str) -> None:
        name = "call_id" if "call_id" in item else "id"
        call_id = _text(item.get(name), f"{here}.call_id")
        if call_id not in self._calls:
            raise InvalidRequest(f"{here}.call_id answers no call before it", param=f"{here}.call_id")
        content = text_of(item.get("output"), f"{here}.output", separator="\n")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _answer(self) -> dict[str, Any]:
        """The assistant's message that the next item belongs to."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._new_answer()

    def _new_answer(self) -> dict[str, Any]:
        self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def text_of(content: object, here: str, *, separator: str = "") -> str:
    """The text of a content that is text or a list of parts.

    Raises:
        InvalidRequest: it is neither, or a part is no text: images, files and sound are not supported.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{here} must be a text or a list of parts", param=here, code="invalid_type")
    texts = []
    for position, part in enumerate(content):
        place = f"{here}[{position}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str):
            raise InvalidRequest(f"{place} must be an object with a type", param=place, code="invalid_type")
        if kind not in _TEXTS:
            raise InvalidRequest(
                f"{place}: parts of type {printable(kind)} are not supported, only text",
                param=f"{place}.type",
                code="unsupported_parameter",
            )
        texts.append(_text(part.get("refusal" if kind == "refusal" else "text"), f"{place}.text"))
    return separator.join(texts)


def _text(value: object, here: str) -> str:
    if value is None:
        raise InvalidRequest(f"{here} is missing", param=here, code="missing_required_parameter")
    if not isinstance(value, str):
        raise InvalidRequest(f"{here} must be a text", param=here, code="invalid_type")
    return value
