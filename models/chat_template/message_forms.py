"""The forms in which a chat template reads messages: turns, contents, and the reasoning of past answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jinja2.nodes
import msgspec

from troupellm.models.chat_template.message_repair import TemplateTraits, repaired, text_of

ContentForm = Literal["both", "parts", "text"]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of one and the same text; the first one that a message has is given under each name that a template reads."""
_PROBE = "a-text-to-look-for"


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
