"""Anthropic's messages and content blocks as chat messages.

Messages of one role in a row are one turn, and the templates of many models refuse two turns of a role. A user's tool
results become messages of the tool role, before the text that stands beside them; an assistant's thinking, text and
tool uses become one message. Blocks of older messages and of results never make a request fail.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from troupellm.protocol.api.anthropic import InputMessage
from troupellm.protocol.api.open_schemas import SKIPPED_BLOCKS
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import printable
from troupellm.server.base.skipped import skipped_names
from troupellm.server.messages.images import IMAGE, SEE_BELOW, Part, image_part, joined_parts
from troupellm.server.messages.tool_changes import CHANGES, ToolChange, tool_change
from troupellm.server.openai.past_messages import MAX_MESSAGES, media_of, newest_places, past_texts, without_billing

ROLES = ("user", "assistant", "system")
_CALLS = ("tool_use", "mcp_tool_use")
_RESULTS = ("tool_result", "mcp_tool_result")
_SKIPPED_ENDING = "_tool_result"
"""Of the results of tools that another server runs; the client's own are `tool_result`."""
_KNOWN = ("text", "tool_reference", "search_result", "document")


class Placed(msgspec.Struct, frozen=True):
    here: str
    """Where a block stands in the request."""
    block: Any
    newest: bool
    """It is the newest turn's own, whose faults are refused."""


class Conversation(msgspec.Struct):
    messages: list[dict[str, Any]] = []
    skipped: dict[str, None] = {}
    """Parts that the model does not get as they were sent; see `skipped_names`."""
    changes: list[ToolChange] = []
    """Of the tools on offer, in order."""
    sees: bool = False
    """The model takes images."""

    def skip(self, noun: str, kinds: Sequence[str]) -> None:
        self.skipped |= dict.fromkeys(skipped_names(noun, kinds))


def conversation_of(system: object, given: Sequence[InputMessage], *, sees: bool = False) -> Conversation:
    """
    Args:
        system: a text or a list of text blocks.
        sees: the model takes images.

    Raises:
        InvalidRequest: too many; or a fault of the system or of the newest turn, which names `messages[i].content[j]`
            and the fault.
    """
    if len(given) > MAX_MESSAGES:
        message = f"messages must have at most {MAX_MESSAGES} entries, got {len(given)}"
        raise InvalidRequest(message, param="messages")
    made = Conversation(sees=sees)
    if system and (text := _system(system)):
        made.messages.append({"role": "system", "content": text})
    newest = newest_places([message.role for message in given])
    roles = [_role(made, place, message.role, newest=place in newest) for place, message in enumerate(given)]
    for role, places in groupby(range(len(given)), lambda place: roles[place]):
        blocks = [one for place in places for one in _blocks(place, given[place].content, newest=place in newest)]
        match role:
            case "user":
                _add_user(made, blocks)
            case "assistant":
                _add_assistant(made, blocks)
            case _:
                for _, run in groupby(blocks, lambda one: one.here.partition(".")[0]):
                    texts = [text for one in run for text in _texts(made, one)]
                    made.messages.append({"role": "system", "content": "\n\n".join(texts)})
    return made


def _role(made: Conversation, place: int, role: str, *, newest: bool) -> str:
    if role in ROLES:
        return role
    if newest:
        here = f"messages[{place}].role"
        raise InvalidRequest(f"{here} must be one of {', '.join(ROLES)}", param=here)
    if role == "developer":
        return "system"
    made.skip("message", [role])
    return "user"


def _system(system: object) -> str:
    """The system's text, without the line that is for the vendor's own server."""
    if isinstance(system, list):
        placed = [Placed(f"system[{place}]", block, newest=True) for place, block in enumerate(system)]
        texts = [without_billing(text) for one in placed for text in _strict_texts(one.block, _kind(one), one.here)]
        return "\n\n".join([text for text in texts if text])
    return without_billing(text_of(system, "system"))


def _blocks(place: int, content: object, *, newest: bool) -> Iterator[Placed]:
    """The blocks of a message."""
    here = f"messages[{place}].content"
    if isinstance(content, str):
        yield Placed(here, {"type": "text", "text": content}, newest=newest)
    elif isinstance(content, list):
        yield from (Placed(f"{here}[{position}]", block, newest=newest) for position, block in enumerate(content))
    elif newest:
        problem = "is missing" if content is None else "must be a text or a list of blocks"
        raise InvalidRequest(f"{here} {problem}", param=here, code="invalid_type")
    else:
        yield Placed(here, content or {"type": "text", "text": ""}, newest=newest)


def _add_user(made: Conversation, blocks: Iterable[Placed]) -> None:
    parts: list[Part] = []
    results = 0
    for one in blocks:
        if _kind(one) in _RESULTS:
            parts += _add_result(made, one)
            results += 1
        elif shown := _shown(made, one):
            parts.append(shown)
        else:
            parts += filter(None, _texts(made, one))
    if parts or not results:
        made.messages.append({"role": "user", "content": joined_parts(parts)})


def _shown(made: Conversation, one: Placed) -> dict[str, Any] | None:
    """The part of an image that the model sees; None for other blocks.

    Raises:
        InvalidRequest: it is the newest turn's own, and has no source.
    """
    if not made.sees or _kind(one) != IMAGE:
        return None
    try:
        return image_part(one.block, one.here)
    except InvalidRequest:
        if one.newest:
            raise
        return None


def _add_result(made: Conversation, one: Placed, *, shows: bool = True) -> list[Part]:
    """Returns the images of the result, which the user's message shows: few templates read them in a result.

    Args:
        shows: whether such a message follows.
    """
    content = one.block.get("content")
    images: list[Part] = []
    if made.sees and shows and isinstance(content, list):
        left: list[Any] = []
        for place, block in enumerate(content):
            shown = _shown(made, Placed(f"{one.here}.content[{place}]", block, newest=False))
            if shown is None:
                left.append(block)
            else:
                images.append(shown)
        content = left
    found = past_texts(content)
    made.skip("block", found.skipped)
    text = "\n\n".join([*found.texts, *([SEE_BELOW] if images else [])])
    if one.block.get("is_error"):
        text = f"Error: {text}"
    made.messages.append({"role": "tool", "tool_call_id": one.block.get("tool_use_id"), "content": text})
    return images


def _add_assistant(made: Conversation, blocks: Iterable[Placed]) -> None:
    reasoning: list[str] = []
    texts: list[str] = []
    uses: list[dict[str, Any]] = []

    def close() -> None:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not uses else None}
        if any(reasoning):
            message["reasoning_content"] = "\n".join(reasoning)
        if uses:
            message["tool_calls"] = list(uses)
        made.messages.append(message)

    ended = False
    for one in blocks:
        kind = _kind(one)
        if kind in _RESULTS:  # of a tool that another server has run within its answer
            if reasoning or texts or uses:
                close()
            reasoning, texts, uses, ended = [], [], [], True
            _add_result(made, one, shows=False)
        elif kind == "thinking":
            reasoning += past_texts(one.block.get("thinking")).texts
        elif kind in _CALLS:
            uses.append(_tool_use(one.block))
        else:
            texts += _texts(made, one)
    if reasoning or texts or uses or not ended:
        close()


def _tool_use(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    arguments = msgspec.json.encode(given).decode() if isinstance(given, Mapping) else given
    call = {"type": "function", "function": {"name": block.get("name"), "arguments": arguments}}
    return call if block.get("id") is None else {"id": block["id"], **call}


def _texts(made: Conversation, one: Placed) -> list[str]:
    """The texts of a block that stands for itself.

    Raises:
        InvalidRequest: it is the newest turn's own, and an image or a file, or has no text.
    """
    kind = _kind(one)
    if kind in CHANGES:
        change = tool_change(one.block)
        made.changes.append(change)
        return [change.line]
    if kind in SKIPPED_BLOCKS or kind.endswith(_SKIPPED_ENDING):
        made.skip("block", [kind])
        return []
    if one.newest and (kind in _KNOWN or media_of(kind) is not None):
        return _strict_texts(one.block, kind, one.here)
    found = past_texts(one.block.get("content")) if kind == "compaction" else past_texts(one.block)
    made.skip("block", [kind] if kind == "compaction" and not found.texts else found.skipped)
    return found.texts


def text_of(content: object, here: str) -> str:
    """The text of a content that is text or a list of blocks with nothing but text.

    Raises:
        InvalidRequest: it is neither; images and documents are not supported.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{here} must be a text or a list of blocks", param=here, code="invalid_type")
    placed = [Placed(f"{here}[{position}]", block, newest=True) for position, block in enumerate(content)]
    return "\n\n".join([text for one in placed for text in _strict_texts(one.block, _kind(one), one.here)])


def _strict_texts(block: Mapping[str, Any], kind: str, here: str) -> list[str]:
    if kind == "text":
        return [_text(block.get("text"), f"{here}.text")]
    if kind == "tool_reference":
        return [_text(block.get("tool_name"), f"{here}.tool_name")]
    if kind == "search_result":
        title = _text(block.get("title"), f"{here}.title")
        return [f"{title}\n{text_of(block.get('content'), f'{here}.content')}"]
    if kind == "document" and isinstance(source := block.get("source"), Mapping):
        if source.get("type") == "text":
            return [_text(source.get("data"), f"{here}.source.data")]
        if source.get("type") == "content":
            return [text_of(source.get("content"), f"{here}.source.content")]
    message = f"{here}: blocks of type {printable(kind)} are not supported here, only text"
    raise InvalidRequest(message, param=f"{here}.type", code="unsupported_parameter")


def _kind(one: Placed) -> str:
    kind = one.block.get("type") if isinstance(one.block, Mapping) else None
    if isinstance(kind, str):
        return kind
    if one.newest:
        raise InvalidRequest(f"{one.here} must be an object with a type", param=one.here, code="invalid_type")
    return ""


def _text(value: object, here: str) -> str:
    if not isinstance(value, str):
        problem = "is missing" if value is None else "must be a text"
        raise InvalidRequest(f"{here} {problem}", param=here, code="invalid_type")
    return value
