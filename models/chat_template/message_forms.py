"""The forms in which a chat template reads conversations: their turns, contents, and the reasoning of past answers.

Later messages do not change the form of an earlier one. So the prompt of a conversation's next turn begins with that of
the turn before.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Literal

import jinja2.nodes
import msgspec

ContentForm = Literal["both", "parts", "text"]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of one and the same text; the first one that a message has is given under each name that a template reads."""
_PROBE = "a-text-to-look-for"
Turns = Literal["free", "merged", "filled", "plain"]
TURNS: Final[tuple[Turns, ...]] = ("free", "merged", "filled", "plain")
"""How a template wants the turns of user and assistant: as they come; alternating; alternating with calls and results
left out of account; alternating, and calls and results told as text."""
Messages = list[dict[str, Any]]

MISSING_START: Final = "[earlier messages are missing]"
"""Stands before a conversation that begins with an answer."""
NO_RESULT: Final = "[no result]"
ACKNOWLEDGED: Final = "OK."
"""The answer between a tool's result and the user's next message, where turns must alternate."""
CONTINUED: Final = "Go on."
"""The question between an answer and the next one, where only a late result stands between them."""
_TEXTS = ("content", "reasoning_content", "reasoning", "thinking")
_SHORT_ID_LETTERS = 9


class TemplateTraits(msgspec.Struct, frozen=True, kw_only=True):
    system_anywhere: bool = True
    """Messages of the system are shown wherever they stand; otherwise at the start only."""
    system_first: bool = True
    """A system message is accepted at the start."""
    turns: Turns = "free"
    string_arguments: bool = True
    """Arguments that are no object are shown as the text that they are."""
    parallel_calls: bool = True
    """An answer may have several calls."""
    short_ids: bool = False
    """Ids of calls must be nine letters and digits."""

    @property
    def alternates(self) -> bool:
        """Two messages of the user in a row are refused."""
        return self.turns != "free"

    @property
    def plain(self) -> "TemplateTraits":
        """Traits of a template that accepts only alternating texts behind one system message."""
        return msgspec.structs.replace(self, system_anywhere=False, turns="plain")


class MessageForms(msgspec.Struct, frozen=True):
    content: ContentForm
    """Forms of content that the template shows: a list of parts, a text, or both."""
    reasoning: tuple[str, ...]
    traits: TemplateTraits = TemplateTraits()

    @property
    def plainer(self) -> "Iterator[MessageForms]":
        """Plainer forms, which more templates accept, for a conversation that the template refuses in this form."""
        plain = self.traits.plain
        for traits in (plain, msgspec.structs.replace(plain, system_first=False)):
            yield msgspec.structs.replace(self, traits=traits)

    def of(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template reads them."""
        return self.contents_of(repaired(messages, self.traits))

    def contents_of(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages in this form; their turns have it already."""
        return [self._one(message) for message in messages]

    def _one(self, message: Mapping[str, Any]) -> dict[str, Any]:
        made = {name: value for name, value in message.items() if name not in REASONING}
        content = message.get("content")
        if self.content == "text" and isinstance(content, list | tuple):
            made["content"] = text_of(content)
        elif self.content == "parts" and isinstance(content, str):
            made["content"] = [{"type": "text", "text": content}] if content else []
        thoughts = next((message[name] for name in REASONING if message.get(name) is not None), None)
        if thoughts is not None:
            for name in self.reasoning:
                # Templates that read `thinking` write it instead of the content of an answer with calls.
                if name != "thinking" or not (message.get("tool_calls") and content):
                    made[name] = thoughts
        return made


def content_form(shown: Callable[[Any], str]) -> ContentForm:
    """The form that a template reads, as a trial shows it.

    Args:
        shown: the text of a chat of one message with a content.
    """
    parts = _shows_parts(shown([{"type": "text", "text": _PROBE}]))
    if not parts:
        return "text"
    return "both" if _PROBE in shown(_PROBE) else "parts"


def reasoning_names(tree: jinja2.nodes.Template) -> tuple[str, ...]:
    """The names of `REASONING` that a template's text has."""
    names = set()
    for node in all_nodes(tree):
        if isinstance(node, jinja2.nodes.Getattr):
            names.add(node.attr)
        elif isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str):
            names.add(node.value)
    return tuple(name for name in REASONING if name in names)


def all_nodes(tree: jinja2.nodes.Template) -> Iterator[jinja2.nodes.Node]:
    """Like `find_all` of jinja2, which calls itself for each level: a sum of a thousand terms has as many."""
    pending: list[jinja2.nodes.Node] = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.iter_child_nodes())


def _shows_parts(text: str) -> bool:
    """True if the text of a part stands by itself, not within the list printed as a whole."""
    return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def repaired(messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> Messages:
    """The conversation as a template with these traits takes it; linear in its length."""
    made: Messages = [dict(message) for message in messages]
    if not traits.string_arguments:
        made = [_with_mappings(message) for message in made]
    if not traits.parallel_calls and traits.turns != "plain":
        made = _one_call_each(made)
    if traits.short_ids:
        made = [_with_short_ids(message) for message in made]
    if not traits.system_anywhere:
        made = _system_at_start(made, kept=traits.system_first)
    if traits.turns == "plain":
        made = _as_text(made)
    return _alternating(made, fill=traits.turns == "filled") if traits.alternates else made


def _with_mappings(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_mapping(call) for call in calls]}


def _with_mapping(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = _function(call).get("arguments")
    if not isinstance(arguments, str):
        return call
    return {**call, "function": {**_function(call), "arguments": {"arguments": arguments}}}


def _one_call_each(messages: Messages) -> Messages:
    """Answers with several calls as one answer for each of them, with its result behind it."""
    made: Messages = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls")
        if not calls:
            made.append(message)
            continue
        begin = place
        while place < len(messages) and messages[place]["role"] == "tool":
            place += 1
        results: dict[str, Messages] = {}
        for result in messages[begin:place]:
            results.setdefault(_key(result.get("tool_call_id")), []).append(result)
        for number, call in enumerate(calls):
            head = message if number == 0 else {"role": "assistant", "content": ""}
            made.append({**head, "tool_calls": [call]})
            own = results.pop(_key(call.get("id")), None)
            named = {"tool_call_id": call["id"]} if "id" in call else {}
            made += own or [{"role": "tool", **named, "name": _function(call).get("name"), "content": NO_RESULT}]
        made += [result for rest in results.values() for result in rest]
    return made


def _key(name: object) -> str:
    """A key that is equal for equal ids, of any type that a client has sent."""
    return name if isinstance(name, str) else f"\0{name!r}"


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool" and isinstance(name := message.get("tool_call_id"), str):
        return {**message, "tool_call_id": _short_id(name)}
    if message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": _short_id(call.get("id"))} for call in message["tool_calls"]]}
    return message


def _short_id(name: object) -> str:
    text = str(name)
    if len(text) == _SHORT_ID_LETTERS and text.isascii() and text.isalnum():
        return text
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:_SHORT_ID_LETTERS]


def _system_at_start(messages: Messages, *, kept: bool) -> Messages:
    """Keep one system message at the start; later ones stay in their places, as texts of the user."""
    number = next((place for place, one in enumerate(messages) if one["role"] != "system"), len(messages))
    begin, rest = messages[:number], messages[number:]
    late = [_user(f"<system-reminder>{_text(one)}</system-reminder>") if _is_system(one) else one for one in rest]
    if not kept:
        return [*(_user(_text(one)) for one in begin), *late]
    if number > 1:
        begin = [{**begin[0], "content": "\n\n".join([_text(one) for one in begin])}]
    return [*begin, *late]


def _as_text(messages: Messages) -> Messages:
    """Write calls and results as text."""
    made: Messages = []
    for message in messages:
        if message["role"] == "tool":
            made.append(_user(f"Result of {message.get('name') or 'a call'}: {_text(message)}"))
        elif message.get("tool_calls"):
            texts = [_text(message), *(_call_as_text(call) for call in message["tool_calls"])]
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            made.append({**rest, "content": "\n".join(filter(None, texts))})
        else:
            made.append(message)
    return made


def _call_as_text(call: Mapping[str, Any]) -> str:
    function = _function(call)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"Call of {function.get('name')}: {text}"


def _alternating(messages: Messages, *, fill: bool) -> Messages:
    """Runs of the user's messages as one message, and runs of answers as one answer; the user begins.

    Args:
        fill: calls and results do not count as turns, so that the others must alternate by themselves.
    """
    made: Messages = []
    for role, group in groupby(messages, lambda message: message["role"]):
        run = list(group)
        if role == "assistant" and (not made or made[-1]["role"] == "system"):
            made.append(_user(MISSING_START))
        made += _joined(run) if role in ("user", "assistant") else run
    return _filled(made) if fill else made


def _filled(messages: Messages) -> Messages:
    made: Messages = []
    asked = False
    for message in messages:
        if message["role"] == "user":
            if asked:
                made.append({"role": "assistant", "content": ACKNOWLEDGED})
            asked = True
        elif message["role"] == "assistant" and not message.get("tool_calls"):
            if not asked:
                made.append(_user(CONTINUED))
            asked = False
        made.append(message)
    return made


def _joined(run: Messages) -> Messages:
    """The messages of a role as one."""
    if len(run) < 2:
        return run
    made = dict(run[0])
    for name in _TEXTS:
        given = [message[name] for message in run if message.get(name)]
        if given:
            made[name] = _joined_content(given)
    calls = [call for message in run for call in message.get("tool_calls") or ()]
    if calls:
        made["tool_calls"] = calls
    return [made]


def _joined_content(given: Sequence[Any]) -> Any:
    if all(isinstance(content, str) for content in given):
        return "\n\n".join(given)
    return [part for content in given for part in _parts(content)]


def _parts(content: Any) -> Iterable[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _text(message: Mapping[str, Any]) -> str:
    return text_of(message.get("content"))


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def text_of(content: Any) -> str:
    """The text of a content: its text parts, a line each."""
    if isinstance(content, list | tuple):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
