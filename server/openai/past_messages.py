"""Messages of a conversation as chat templates read them: contents as text, calls with their results, reasoning.

A past message never makes a conversation fail: it is rendered, told as text, or left out and named. Only the newest
turn's own faults are refused. Texts come in the forms of every API: any server or client may have written them. A
placeholder stands for an image, a sound or a file; other parts without text are left out. The client is told of both.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.api.chat import ChatMessage
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.media import MediaSource
from troupellm.server.base.skipped import skipped_names
from troupellm.server.openai.image_parts import IMAGE_PART, image_source, is_image

MEDIA = ("image", "audio", "video", "file")
TEXT_ONLY = "images are not taken here"
_AS_FILES = ("document", "pdf", "attachment")
_RESULTS = ("tool", "function")
"""Roles of the results of tools."""
_FIELDS = {"refusal": "refusal", "tool_reference": "tool_name"}
"""Where parts of a type have their text; those of all others have it in `text`."""


class PastTexts(msgspec.Struct, frozen=True):
    texts: list[str]
    skipped: list[str]
    """Types of the parts that are not shown as they are."""


def newest_places(roles: Sequence[str]) -> frozenset[int]:
    """Which messages are the newest turn's own: the user's last message, and the last message of all.

    A message behind the results of tools is neither: clients put the images of results there.

    Args:
        roles: of the messages in order; results have tool or function, and other entries an empty text.
    """
    known = max((place for place, role in enumerate(roles) if role in ("assistant", *_RESULTS)), default=-1)
    if known >= 0 and roles[known] in _RESULTS:
        return frozenset()
    users = [place for place, role in enumerate(roles) if role == "user"]
    others = [place for place, role in enumerate(roles) if role]
    return frozenset(place for place in (*users[-1:], *others[-1:]) if place > known)


def media_of(kind: str) -> str | None:
    """The medium of a type of part: image, audio, video or file; None for other types."""
    if any(word in kind for word in _AS_FILES):
        return "file"
    return next((medium for medium in MEDIA if medium in kind), None)


def omitted(medium: str) -> str:
    """Stands in the place of an image, a sound, a film or a file."""
    return f"[{medium} omitted: this model reads text only]"


def past_texts(content: object) -> PastTexts:
    """The texts of a content: a text, a part, or a list of both. Never fails."""
    texts: list[str] = []
    skipped: list[str] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        if isinstance(part, list | tuple):
            found = past_texts(part)
            texts += found.texts
            skipped += found.skipped
        else:
            _read(part, texts, skipped)
    return PastTexts(texts, skipped)


def _read(part: object, texts: list[str], skipped: list[str]) -> None:
    if isinstance(part, str):
        texts.append(part)
        return
    if part is None:
        return
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str | None):
        skipped.append(type(part).__name__)
        return
    kind = kind or "text"
    inner = _inner(part, kind)
    if inner is not None:
        found = past_texts(inner)
        texts += found.texts
        skipped += found.skipped
        return
    text = part.get(_FIELDS.get(kind, "text"))
    medium = media_of(kind)
    if isinstance(text, str):
        texts.append(text)
    elif medium is not None:
        texts.append(omitted(medium))
        skipped.append(kind)
    else:
        skipped.append(kind)


def _inner(part: Mapping[str, Any], kind: str) -> object:
    """The content that a part encloses; None for a part without one."""
    source = part.get("source")
    if kind == "document" and isinstance(source, Mapping):
        return {"text": source.get("data"), "content": source.get("content")}.get(str(source.get("type")))
    if kind == "search_result":
        title = part.get("title")
        inner = past_texts(part.get("content")).texts
        return "\n".join([*([title] if isinstance(title, str) else []), *inner])
    if kind == "resource" and isinstance(resource := part.get("resource"), Mapping):
        return resource.get("text", {"type": "file"})
    return None


_LINE = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z)\n*", re.IGNORECASE)


def without_billing(text: str) -> str:
    """A text of the system without the line by which coding agents account for their requests, where it begins with it:
    the line changes with each request, so that no two prompts of a session would have a common beginning.
    """
    found = _LINE.match(text)
    return text if found is None else text[found.end() :]


MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
WITHOUT_CALL = "without_call"
"""Kind of a result that answers no call before it."""
_SYSTEM = ("system", "developer")
_SPELT_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
"""Of a surrogate pair: JSON can spell it, and no prompt can hold it."""
_UNNAMED = "unnamed"
_REASONING = ("thinking", "reasoning")
"""Types of parts."""


class PlainChat(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    skipped: list[str]
    """Parts that the model does not get as they were sent; see `skipped_names`."""
    media: tuple[MediaSource, ...] = ()
    """One for each part of type image in the messages."""


def plain_messages(messages: Sequence[ChatMessage], no_images: str | None = TEXT_ONLY) -> PlainChat:
    """
    Args:
        no_images: why the model takes no images; None where it takes them.

    Raises:
        InvalidRequest: none or too many, or a fault of the newest turn; names `messages[i]` and the field in it.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        message = f"messages must have at most {MAX_MESSAGES} entries, got {len(messages)}"
        raise InvalidRequest(message, param="messages")
    reader = _Reader(newest_places([message.role or "?" for message in messages]), no_images)
    for place, given in enumerate(messages):
        reader.add(place, given)
    if not reader.made:
        raise InvalidRequest("messages must not be empty", param="messages")
    return PlainChat(reader.made, list(reader.skipped), tuple(reader.media))


def plain_arguments(given: object) -> dict[str, Any] | str:
    """An object where there is one, or where the text is one; otherwise the text that a model has written.

    Halves of surrogate pairs go: no template's text could be read any more over them.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False)
    if not given.strip():
        return {}
    try:
        value = json.loads(given)
        if _SPELT_HALF.search(given):
            value = json.loads(_HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return given
    if value is None:
        return {}
    return value if isinstance(value, dict) else given


class _Reader:
    def __init__(self, newest: frozenset[int], no_images: str | None) -> None:
        self.media: list[MediaSource] = []
        self._no_images = no_images
        self.made: list[dict[str, Any]] = []
        self.skipped: dict[str, None] = {}
        self._newest = newest
        self._calls: dict[str, str] = {}
        """Names by id."""
        self._open: dict[str, None] = {}
        """Ids of the last answer's calls that have no result yet."""

    def add(self, place: int, message: ChatMessage) -> None:
        here, role, newest = f"messages[{place}]", message.role, place in self._newest
        if role not in ROLES:
            if newest:
                raise InvalidRequest(f"{here}.role must be one of {', '.join(ROLES[:-1])}", param=f"{here}.role")
            self._skip("message", [role])
            role = "user"
        if role in _RESULTS:
            self._result(here, message)
        elif role == "assistant":
            self._answer(place, message)
        else:
            content = self._strict_content(here, message.content) if newest else self._content(message.content, here)
            if role in _SYSTEM and not self.made:
                rest = _without_billing(content)
                if content and not rest:
                    return  # nothing but the line for the vendor's own server
                content = rest
            # Few templates know the developer role, which took the system role's place.
            self._append("system" if role in _SYSTEM else "user", content, message)

    def _append(self, role: str, content: object, message: ChatMessage) -> dict[str, Any]:
        made = {"role": role, "content": content}
        if isinstance(message.name, str):
            made["name"] = message.name
        self.made.append(made)
        return made

    def _answer(self, place: int, message: ChatMessage) -> None:
        given, parts = message.content, []
        if isinstance(given, list):  # some servers give reasoning as parts of the content
            parts = [part for part in given if _kind(part) in _REASONING]
            given = [part for part in given if _kind(part) not in _REASONING]
        content = self._content(given)
        if not content and isinstance(message.refusal, str):
            content = message.refusal
        if isinstance(message.audio, Mapping):
            self._skip("message", ["audio"])
            content = content or omitted("audio")
        made = self._append("assistant", content, message)
        calls = list(self._plain_calls(place, message))
        if calls:
            made["tool_calls"] = calls
            self._open = {call["id"]: None for call in calls}
            self._calls |= {call["id"]: call["function"]["name"] for call in calls}
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if isinstance(reasoning, str):
            made["reasoning_content"] = reasoning
        elif reasoning is not None or parts:
            found = reasoning if reasoning is not None else [part.get(_kind(part), part.get("text")) for part in parts]
            made["reasoning_content"] = "\n".join(past_texts(found).texts)

    def _plain_calls(self, place: int, message: ChatMessage) -> Iterator[dict[str, Any]]:
        given = message.tool_calls
        calls = given if isinstance(given, list) else [] if given is None else [given]
        if isinstance(message.function_call, Mapping):
            calls = [*calls, {"function": message.function_call}]
        for index, call in enumerate(calls):
            function = _function(call)
            if function is None:
                kind = call.get("type") if isinstance(call, Mapping) else None
                self._skip("call", [str(kind or "?")])
                continue
            name, call_id = function.get("name"), call.get("id")
            yield {
                "id": call_id if isinstance(call_id, str) and call_id else f"call_{place}_{index}",
                "type": "function",
                "function": {
                    "name": name if isinstance(name, str) and name else _UNNAMED,
                    "arguments": plain_arguments(function.get("arguments")),
                },
            }

    def _result(self, here: str, message: ChatMessage) -> None:
        content = self._content(message.content, here)
        call_id = message.tool_call_id
        if call_id is None and self._open:
            call_id = next(iter(self._open))
        if not isinstance(call_id, str) or call_id not in self._calls:
            self._skip("result", [WITHOUT_CALL])
            told = "Result of an earlier call: "
            whole = f"{told}{content}" if isinstance(content, str) else _joined(told, content)
            self.made.append({"role": "user", "content": whole})
            return
        self._open.pop(call_id, None)
        made = self._append("tool", content, message)
        made["tool_call_id"] = call_id
        made.setdefault("name", self._calls[call_id])

    def _content(self, content: object, here: str = "") -> str | list[dict[str, str]]:
        """A text, or its parts: the chat template decides which form it reads.

        Args:
            here: of a message whose images the model may see.
        """
        if isinstance(content, str):
            return content
        if here and self._no_images is None and isinstance(content, list) and any(map(is_image, content)):
            parts: list[dict[str, str]] = []
            for place, part in enumerate(content):
                parts += self._past_image(f"{here}.content[{place}]", part) if is_image(part) else self._texts([part])
            return parts
        found = past_texts(content)
        self._skip("part", found.skipped)
        if isinstance(content, list):
            return [{"type": "text", "text": text} for text in found.texts]
        return "\n".join(found.texts)  # templates write a content that is null as "None"

    def _texts(self, parts: list[object]) -> list[dict[str, str]]:
        found = self._content(parts)
        return found if isinstance(found, list) else [{"type": "text", "text": found}]

    def _past_image(self, field: str, part: Mapping[str, Any]) -> list[dict[str, str]]:
        try:
            self.media.append(image_source(part, field))
        except InvalidRequest:
            return self._texts([part])
        return [IMAGE_PART]

    def _strict_content(self, here: str, content: object) -> str | list[dict[str, str]]:
        """
        Raises:
            InvalidRequest: it is missing, or has a part that the model does not take.
        """
        if content is None:
            message = f"{here}.content is missing"
            raise InvalidRequest(message, param=f"{here}.content", code="missing_required_parameter")
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            message = f"{here}.content must be a text or a list of parts"
            raise InvalidRequest(message, param=f"{here}.content", code="invalid_type")
        parts = []
        for position, part in enumerate(content):
            param = f"{here}.content[{position}]"
            if is_image(part):
                if self._no_images is not None:
                    raise InvalidRequest(f"{param} must be a part of type text: {self._no_images}", param=param)
                self.media.append(image_source(part, param))
                parts.append(IMAGE_PART)
                continue
            kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
            if kind != "text" or not isinstance(text, str):
                raise InvalidRequest(f"{param} must be a part of type text with a text", param=param)
            parts.append({"type": "text", "text": text})
        return parts

    def _skip(self, noun: str, kinds: Sequence[str]) -> None:
        if kinds:
            self.skipped |= dict.fromkeys(skipped_names(noun, kinds))


def _without_billing(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return without_billing(content)
    if not content or "text" not in content[0]:
        return content
    text = without_billing(content[0]["text"])
    return [{**content[0], "text": text}, *content[1:]] if text else content[1:]


def _kind(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _function(call: object) -> Mapping[str, Any] | None:
    """Name and arguments of a call, in any of the forms in which servers write them."""
    if not isinstance(call, Mapping):
        return None
    function, custom = call.get("function"), call.get("custom")
    if isinstance(function, Mapping):
        return function
    if isinstance(custom, Mapping):
        return {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return call if "name" in call else None


def _joined(told: str, parts: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """The parts behind a text, as one text where none of them is an image."""
    if any(part["type"] != "text" for part in parts):
        return [{"type": "text", "text": told}, *parts]
    return told + "\n".join([part["text"] for part in parts])
