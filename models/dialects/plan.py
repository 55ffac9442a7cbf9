"""Descriptions taken apart, so that they can be run: marks to look for, and what follows each."""

from functools import lru_cache
from typing import Final

from troupellm.models.dialects.harmony import ChannelMarks
from troupellm.models.dialects.marks import Marks
from troupellm.models.dialects.syntax import Dialect, Element, Hole, Word, elements, marks_of
from troupellm.models.dialects.tagged import TaggedParameter

_FIRSTS: Final = {"json": "{[", "python": "[", "arguments": "{"}


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
        """Whether what follows the lead may begin so."""
        first = self.rest[0]
        if isinstance(first, Word):
            return first.text.startswith(character)
        allowed = _FIRSTS.get(first.name) if isinstance(first, Hole) else None
        return character in allowed if allowed else character.isalnum() or character == "_"


class Plan:
    """A description, ready to run; `hidden` are those of its marks that must never show."""

    def __init__(self, dialect: Dialect, hidden: frozenset[str]) -> None:
        """
        Raises:
            ValueError: the description contradicts itself.
        """
        calls, thinking = dialect.calls, dialect.thinking
        marks = marks_of(dialect)
        hidden = frozenset(text for text in hidden if all(text == mark or text not in mark for mark in marks))
        self.channels = None if dialect.channels is None else ChannelMarks(dialect.channels)
        self.thinking = thinking
        self.syntax = calls
        self.hidden = hidden
        self.forms = [Form(template) for template in calls.forms] if calls else []
        self.bare = Form(calls.bare) if calls and calls.bare else None
        self.parameter = TaggedParameter(calls.parameter) if calls and calls.parameter else None
        self.leads = {form.lead for form in self.forms if form.lead}
        self.opens = frozenset(thinking.opens if thinking and thinking.anywhere else ())
        section = frozenset(calls.section or ()) if calls else frozenset[str]()
        plain = self.leads | self.opens | section | hidden | set(thinking.drops if thinking else ())
        closers = frozenset[str]().union(*(form.closers for form in self.forms))
        self.content = Marks(plain)
        self.after_call = Marks(plain | closers)
        self.beyond = Marks(self.opens | hidden)
        """Behind so many calls, or beginnings of some, that nobody means them."""
        self.broken = Marks(self.leads | closers | hidden)
        """What ends arguments that are no JSON."""
        self.ends = frozenset(thinking.closes if thinking else ())
        if thinking and thinking.ends_at_calls:
            self.ends |= self.leads | section
        self.thoughts = Marks(self.ends | hidden)


@lru_cache(maxsize=64)
def plan_of(dialect: Dialect, hidden: frozenset[str] = frozenset()) -> Plan:
    """The plan of a description, made once."""
    return Plan(dialect, hidden)
