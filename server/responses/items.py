"""Input items of the responses API as chat messages.

Items of one answer (reasoning, text, calls) become one assistant message, which is what chat templates know. Messages
of the system before everything else become one, because few templates take several. Their texts are put together once,
at the end, so that the cost of a conversation is linear in its size, however it is cut into items. A past item never
makes a request fail.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import printable
from troupellm.server.base.skipped import skipped_names
from troupellm.server.openai.past_messages import newest_places, past_texts, without_billing
from troupellm.server.responses.past_calls import CALLS, OUTPUTS, Item, call_id_of, past_call, past_output
from troupellm.server.responses.sealed import unsealed
from troupellm.server.responses.summaries import said_of

MAX_ITEMS = 10_000
MAX_UNPACKED_BYTES = 8 * 2**20
"""Of the packed texts of one conversation, where its caller does not say."""

_SYSTEM = ("system", "developer")
_ROLES = ("user", "assistant", *_SYSTEM)
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_REASONING = ("reasoning", "agent_reasoning")
_SUMMARIES = ("compaction", "compaction_summary", "context_compaction")
_FOREIGN = "gAAAA"
"""Begins every text that another server has encrypted."""


class Conversation(msgspec.Struct):
    messages: list[dict[str, Any]] = []
    skipped: dict[str, None] = {}
    """Parts of the request's own input that the model does not get as they were sent; see `skipped_names`."""
    tools: list[Any] = []
    """Those that its items offer beside the request's own."""
    effort: object = None
    """The last one that an item has set."""
    format: object = None
    unpacked: int = 0
    """Bytes of the texts that its items had packed; see `sealed`."""

    def skip(self, noun: str, kinds: Sequence[str]) -> None:
        self.skipped |= dict.fromkeys(skipped_names(noun, kinds))


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


def conversation_of(
    items: Sequence[Item], instructions: str | None, *, first: int = 0, room: int = MAX_UNPACKED_BYTES
) -> Conversation:
    """
    Args:
        items: the past ones and the input, in this order.
        first: where the input begins in `items`, so that errors count as the client does.
        room: bytes that packed texts of all items may unpack to; items with more are skipped.

    Raises:
        InvalidRequest: a fault of the newest turn; names `input[i]` and the fault.
    """
    newest = newest_places([_turn(item) for item in items])
    transcript = _Transcript(instructions, room)
    for position, item in enumerate(items):
        if position == first:
            transcript.made.skipped.clear()
        here = f"input[{position - first}]" if position in newest and position >= first else None
        transcript.add(item, here)
    return transcript.finish()


def _turn(item: Item) -> str:
    """The role of the turn that an item belongs to; empty for outputs and unknown items."""
    kind = item_type(item)
    if kind == "message":
        return role if (role := item.get("role")) in _ROLES else "other"
    return "assistant" if kind in CALLS or kind in _REASONING else ""


class _Transcript:
    """Texts that grow are lists of their pieces until `finish`."""

    def __init__(self, instructions: str | None, room: int) -> None:
        self.made = Conversation()
        self._room = room
        self.messages = self.made.messages
        if instructions and (text := without_billing(instructions)):
            self.messages.append({"role": "system", "content": [text]})

    def finish(self) -> Conversation:
        for message in self.messages:
            separator = "\n\n" if message["role"] == "system" else ""
            for field in ("content", "reasoning_content"):
                if isinstance(pieces := message.get(field), list):
                    message[field] = separator.join(pieces)
        if not self.messages or (self.made.skipped and all(one["role"] == "system" for one in self.messages)):
            self._user("")
        return self.made

    def add(self, item: Item, here: str | None) -> None:
        """
        Args:
            here: the client's name of an item of the newest turn, whose faults are refused; None for others.
        """
        kind = item_type(item)
        if kind == "message":
            self._message(item, here)
        elif kind in _REASONING:
            self._reasoning(item, kind)
        elif kind in CALLS:
            self._call(item, kind)
        elif kind in OUTPUTS:
            self._output(item, kind)
        elif kind == "agent_message":
            self._agent_message(item)
        elif kind in _SUMMARIES:
            self._summary(item, kind)
        elif kind == "additional_tools":
            self._offer(item)
        elif kind == "configuration_update":
            self._configure(item)
        elif item.get("role") in _ROLES and past_texts(item.get("content", item.get("text"))).texts:
            self._message({"content": item.get("text"), **item}, None)
        else:
            self.made.skip("item", [kind])

    def _message(self, item: Item, here: str | None) -> None:
        role = item.get("role")
        if role not in _ROLES:
            if here is not None:
                raise InvalidRequest(f"{here}.role must be one of {', '.join(_ROLES)}", param=f"{here}.role")
            self.made.skip("message", [str(role)])
        # Parts of a user's message are separated, as in chats; an answer's own parts follow on each other.
        separator = "" if role == "assistant" else "\n"
        if here is not None:
            text = _strict_text(item.get("content"), f"{here}.content", separator)
        else:
            text = self._text(item.get("content"), separator)
        if role not in _ROLES:
            role = "user"
            if not text:
                return
        if role == "assistant":
            answer = self._answer()
            if "tool_calls" in answer:
                answer = self._new_answer()
            answer["content"] = answer["content"] or []
            answer["content"].append(text)
        elif role in _SYSTEM and all(message["role"] == "system" for message in self.messages):
            if not self.messages:
                self.messages.append({"role": "system", "content": []})
            self.messages[0]["content"].append(without_billing(text))
        elif role in _SYSTEM:
            self.messages.append({"role": "system", "content": [text]})
        else:
            self._user(text)

    def _text(self, content: object, separator: str) -> str:
        if isinstance(content, str):
            return content
        found = past_texts(content)
        self.made.skip("part", found.skipped)
        return separator.join(found.texts)

    def _reasoning(self, item: Item, kind: str) -> None:
        texts = past_texts(item.get("content", item.get("text"))).texts
        sent = item.get("encrypted_content")
        if not any(texts):
            own = self._unsealed(sent)
            texts = [own] if own else past_texts(item.get("summary")).texts
        text = "\n".join(texts)
        if not text:
            if sent:
                self.made.skip("item", [kind])
            return
        last = self.messages[-1] if self.messages else None
        fresh = last is None or last["role"] != "assistant" or last["content"] is not None or "tool_calls" in last
        answer = self._new_answer() if fresh else self._answer()
        answer.setdefault("reasoning_content", []).append(text)

    def _call(self, item: Item, kind: str) -> None:
        call = past_call(item, kind)
        self._answer().setdefault("tool_calls", []).append(call)
        if kind == "mcp_call" and (item.get("output") is not None or item.get("error") is not None):
            self._result(item, kind, call.get("id"))

    def _output(self, item: Item, kind: str) -> None:
        self._result(item, kind, call_id_of(item, kind))
        self._offer(item)

    def _result(self, item: Item, kind: str, call_id: str | None) -> None:
        output = past_output(item, kind)
        self.made.skip("part", output.skipped)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output.text})

    def _agent_message(self, item: Item) -> None:
        content = item.get("content")
        texts = []
        for part in content if isinstance(content, list) else [content]:
            sent = part.get("encrypted_content") if isinstance(part, Mapping) else None
            if sent is None:
                texts.append(self._text([part], ""))
            elif isinstance(sent, str) and not sent.startswith(_FOREIGN):
                texts.append(sent)  # by our own model, which has written the message as plain text
            else:
                self.made.skip("item", ["agent_message"])
        text = "\n".join([one for one in texts if one])
        if text:
            self._user(f"Message from {_named(item, 'author')} to {_named(item, 'recipient')}: {text}")

    def _summary(self, item: Item, kind: str) -> None:
        text = self._unsealed(item.get("encrypted_content"))
        if text is None:
            self.made.skip("item", [kind])
            return
        for said in said_of(text):
            self._user(said)

    def _unsealed(self, value: object) -> str | None:
        text = unsealed(value, self._room)
        if text is not None:
            size = len(text.encode())
            self._room -= size
            self.made.unpacked += size
        return text

    def _offer(self, item: Item) -> None:
        tools = item.get("tools")
        if isinstance(tools, list):
            self.made.tools += tools

    def _configure(self, item: Item) -> None:
        reasoning, text = item.get("reasoning"), item.get("text")
        if isinstance(reasoning, Mapping) and reasoning.get("effort") is not None:
            self.made.effort = reasoning["effort"]
        if isinstance(text, Mapping) and text.get("format") is not None:
            self.made.format = text["format"]

    def _user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def _answer(self) -> dict[str, Any]:
        """The assistant's message that the next item belongs to."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._new_answer()

    def _new_answer(self) -> dict[str, Any]:
        self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def _named(item: Item, field: str) -> str:
    value = item.get(field)
    return value if isinstance(value, str) and value else "?"


def _strict_text(content: object, here: str, separator: str) -> str:
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
