"""A chat syntax's description compiled for the parser: marks to look for, and the elements that follow each."""

from functools import lru_cache
from typing import Final

from troupellm.models.chat_parsers.harmony import ChannelMarks
from troupellm.models.chat_parsers.json_arguments import ArgumentEnds
from troupellm.models.chat_parsers.syntax import CallSyntax, ChatSyntax, Element, Hole, Maybe, Word, elements, marks_of
from troupellm.models.chat_parsers.until_marker import Marks
from troupellm.models.chat_parsers.xml_calls import TaggedParameter

_FIRSTS: Final = {"json": "{[", "named": "{[", "python": "[", "arguments": "{"}
LINE: Final = "\n{"
"""The beginning of a call without marks at the start of a line."""


class Form:
    """A template, taken apart."""

    def __init__(self, template: str) -> None:
        parts = elements(template)
        first = parts[0]
        self.lead = first.text if isinstance(first, Word) else ""
        self.rest: tuple[Element, ...] = parts[1:] if self.lead else parts
        self.closers = frozenset(
            part.text for part in self.rest[self._last_hole() :] if isinstance(part, Word) and len(part.text) > 1
        )

    def _last_hole(self) -> int:
        return max(index for index, part in enumerate(self.rest) if isinstance(part, Hole)) + 1

    def takes(self, character: str) -> bool:
        """True if the text after the lead may begin with this character."""
        return _takes(self.rest, character)


def _takes(parts: tuple[Element, ...], character: str) -> bool:
    first = parts[0]
    if isinstance(first, Maybe):
        return _takes(first.parts, character) or _takes(parts[1:], character)
    if isinstance(first, Word):
        return first.text.startswith(character)
    allowed = _FIRSTS.get(first.name)
    return character in allowed if allowed else character.isalnum() or character == "_"


class Plan:
    """A description, ready to run; `hidden` are those of its marks that must never show."""

    def __init__(self, chat_syntax: ChatSyntax, hidden: frozenset[str]) -> None:
        """
        Raises:
            ValueError: the description contradicts itself.
        """
        calls, thinking = chat_syntax.calls, chat_syntax.thinking
        marks = marks_of(chat_syntax)
        hidden = frozenset(text for text in hidden if all(text == mark or text not in mark for mark in marks))
        self.channels = None if chat_syntax.channels is None else ChannelMarks(chat_syntax.channels)
        self.thinking = thinking
        self.syntax = calls
        self.hidden = hidden
        self.forms = [Form(template) for template in calls.forms] if calls else []
        self.block = Form(calls.block) if calls and calls.block else None
        self.bare = Form(calls.bare) if calls and calls.bare else None
        self.leads = {form.lead for form in self.forms if form.lead}
        self.opens = frozenset(thinking.opens if thinking and thinking.anywhere else ())
        self.drops = frozenset(thinking.drops if thinking else ())
        self.header = thinking.header if thinking else None
        sections = [*([calls.section] if calls.section else []), *calls.sections] if calls else []
        section = frozenset(mark for pair in sections for mark in pair)
        self.begins = self.leads | {opens for opens, _ in sections}
        """Marks with which calls begin."""
        heads = {self.header[0]} if self.header else set[str]()
        plain = self.leads | self.opens | section | hidden | heads | self.drops
        closers = frozenset[str]().union(*(form.closers for form in self.forms))
        lines = {LINE} if calls and calls.bare_lines else set[str]()
        self.ends = frozenset(thinking.closes if thinking else ())
        self.content = Marks(plain | lines)
        self.after_call = Marks(plain | closers | lines | self.ends)
        """A mark that ends reasoning may come late, behind a call in it."""
        self.beyond = Marks(self.opens | hidden)
        """Marks that matter after so many calls, or beginnings of calls, that further ones are not meant as calls."""
        self.broken = Marks(self.leads | closers | hidden)
        """Marks that end arguments that are no JSON."""
        special = hidden & (self.leads | section | closers)
        self.argument_ends = ArgumentEnds(Marks(self.leads | section | closers), Marks(special))
        self.parameters = sorted(_parameters(calls, special), key=lambda found: -len(found.opens))
        """Spellings; a mark may begin as another one does."""
        self.only_reasoning = Marks(self.ends | hidden | heads | self.drops)
        self.reasoning = Marks(self.ends | hidden | heads | self.drops | self.begins)


def _parameters(calls: CallSyntax | None, special: frozenset[str]) -> list[TaggedParameter]:
    if calls is None or not calls.parameter:
        return []
    templates = (calls.parameter, *calls.parameters)
    return [TaggedParameter(template, special, entities=calls.entities) for template in templates]


@lru_cache(maxsize=64)
def plan_of(chat_syntax: ChatSyntax, hidden: frozenset[str] = frozenset()) -> Plan:
    """The plan of a description, made once."""
    return Plan(chat_syntax, hidden)
