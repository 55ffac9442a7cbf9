"""The one parser: runs a description over the text of an answer, whatever the pieces in which it comes.

What is not a call stays content, and nothing that a model writes raises. The same text gives the same pieces in the
end, however it was cut.
"""

import logging
import re
from collections.abc import Collection
from typing import Final, Literal

from troupellm.models.dialects.harmony import read_channels
from troupellm.models.dialects.json_calls import json_calls
from troupellm.models.dialects.json_text import json_value
from troupellm.models.dialects.marks import text_until
from troupellm.models.dialects.offer import Offer
from troupellm.models.dialects.plan import Form, Plan
from troupellm.models.dialects.python_calls import python_calls
from troupellm.models.dialects.source import MOST_CALLS, NewId, NotACall, Reading, Source, literal, peek, spaces, word
from troupellm.models.dialects.syntax import CallSyntax, Element, Hole, Maybe, Thinking, Word
from troupellm.models.dialects.tagged import tagged_parameters
from troupellm.protocol.dialect import Content, ParsedPiece

logger = logging.getLogger("troupellm.models")

Start = Literal["free", "thinking", "answer"]
"""Where the prompt leaves off: before everything, inside of thoughts, or behind them."""

NO_LIMIT: Final = 1 << 30
MOST_TRIALS: Final = 512
"""Beginnings of calls in one answer; each costs some ten microseconds."""
_NUMBERED: Final = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class Parser:
    """Follows the text of one answer. See `actors.turn.ChoiceParser`."""

    def __init__(
        self,
        plan: Plan,
        *,
        offer: Offer,
        new_id: NewId,
        start: Start = "free",
        most_calls: int = NO_LIMIT,
        channel: str = "",
        with_calls: bool = True,
        forced: bool = False,
    ) -> None:
        """
        Args:
            with_calls: tools are on offer. A plan without calls has none anyway; channels ask.
            most_calls: how many calls are shown.
            forced: a guide lets through nothing but calls behind the thoughts: what is left over at the end is the
                beginning of one, and is not shown.
            channel: where there are channels, the one of the message that the prompt ends with.
        """
        self._source = Source(new_id, most_calls)
        if plan.channels is not None:
            self._steps = read_channels(self._source, plan.channels, with_calls=with_calls, region=channel)
        else:
            self._steps = _read(self._source, plan, offer, start)
        self._forced = forced
        self._over = False

    @property
    def has_whole_calls(self) -> bool:
        """There are calls, and the last one has all its arguments."""
        return self._source.calls > 0 and self._source.whole

    @property
    def state(self) -> tuple[str, str, int]:
        """What is being read, what is held back, and how many calls there were."""
        return self._source.region, self._source.pending, self._source.calls

    def feed(self, text: str) -> list[ParsedPiece]:
        if not text:
            return []
        if self._over:
            self._source.content(text)
        else:
            self._source.add(text)
            self._go_on()
        return self._source.drain()

    def finish(self, *, cut: bool = False) -> list[ParsedPiece]:
        """What was held back; the text has ended.

        Args:
            cut: a limit or a stop string ended it, and not the model.
        """
        self._source.ended, self._source.cut = True, cut
        if not self._over:
            self._go_on()
        pieces = self._source.drain()
        return [piece for piece in pieces if not isinstance(piece, Content)] if self._forced else pieces

    def _go_on(self) -> None:
        source = self._source
        try:
            next(self._steps)
        except StopIteration:
            self._over = True
        except Exception:  # a bug of ours is no reason to lose an answer
            logger.exception("the parser of an answer failed; the rest of it is shown as it is")
            self._over = True
        if self._over:
            source.content(source.give_up() + source.text[source.pos :])
            source.text, source.pos = "", 0


def _read(source: Source, plan: Plan, offer: Offer, start: Start) -> Reading[None]:
    """A whole answer."""
    thinking = plan.thinking
    if thinking is not None and (yield from _begins_with_thoughts(source, thinking, start)):
        mark = yield from _think(source, plan)
    else:
        mark = ""
    source.region = "content"
    marks, trials = plan.content, 0
    if not mark and plan.bare is not None:
        mark = yield from _call(source, plan, offer, plan.bare, gap="")
    while True:
        gap = ""
        if source.calls >= MOST_CALLS or trials >= MOST_TRIALS:
            marks = plan.beyond
        elif source.calls:
            marks = plan.after_call
        if not mark:
            found = yield from text_until(source, marks, source.content)
            if found is None:
                return
            mark, gap = found.mark, found.gap
        if mark in plan.leads:
            trials += 1
            mark = yield from _call(source, plan, offer, mark, gap=gap)
            source.region = "content"
            continue
        if mark in plan.opens:
            mark = yield from _think(source, plan)
            source.region = "content"
            continue
        mark = ""
        if source.calls:
            yield from spaces(source)


def _begins_with_thoughts(source: Source, thinking: Thinking, start: Start) -> Reading[bool]:
    """Whether thoughts come first; an opening mark is taken."""
    if start == "answer":
        return False
    source.attempt()
    yield from spaces(source)
    for mark in thinking.opens:
        if (yield from literal(source, mark)):
            source.commit()
            return True
    if start == "thinking" or thinking.begins == "always":
        source.reasoning(source.give_up().lstrip())
        return True
    source.content(source.give_up())
    return False


def _think(source: Source, plan: Plan) -> Reading[str]:
    """Thoughts; gives the mark of a call that ended them."""
    source.region = "reasoning"
    yield from spaces(source)
    found = yield from text_until(source, plan.thoughts, source.reasoning)
    while found is not None and found.mark not in plan.ends:
        found = yield from text_until(source, plan.thoughts, source.reasoning)
    yield from spaces(source)
    return found.mark if found is not None and found.mark in plan.leads else ""


def _call(source: Source, plan: Plan, offer: Offer, lead: "str | Form", *, gap: str) -> Reading[str]:
    """What a lead announces, or what stands at the start of an answer; gives the next lead where one has ended it.

    What turns out to be no call is content.
    """
    source.region = "call"
    bare = isinstance(lead, Form)
    source.attempt(gap, "" if isinstance(lead, Form) else lead)
    calls = source.calls
    try:
        yield from spaces(source)
        character = yield from peek(source)
        form = lead if isinstance(lead, Form) else _choose(plan.forms, lead, character)
        mark = yield from _form(source, plan, offer, form, bare=bare)
    except NotACall:
        text = source.give_up()
        for hidden in plan.hidden:
            text = text.replace(hidden, "")
        source.content(text)
        return ""
    if source.calls > calls:
        yield from spaces(source)
    return mark


def _choose(forms: Collection[Form], lead: str, character: str) -> Form:
    for form in forms:
        if form.lead == lead and character and form.takes(character):
            return form
    raise NotACall


def _form(source: Source, plan: Plan, offer: Offer, form: Form, *, bare: bool) -> Reading[str]:
    """The rest of a template; gives the lead that ended it too early.

    Raises:
        NotACall: the text is something else.
    """
    reader = _FormReader(source, plan, offer, bare=bare)
    for index, part in enumerate(form.rest):
        yield from spaces(source)
        if isinstance(part, Maybe):
            yield from reader.maybe(part)
            continue
        if isinstance(part, Word):
            if (yield from literal(source, part.text)):
                continue
            if source.attempting:
                raise NotACall
            return ""
        following = form.rest[index + 1] if index + 1 < len(form.rest) else None
        if not (yield from reader.hole(part.name, following)):
            found = yield from text_until(source, plan.broken, source.arguments)
            return found.mark if found is not None and found.mark in plan.leads else ""
    return ""


class _FormReader:
    """What the holes of one call have said so far."""

    def __init__(self, source: Source, plan: Plan, offer: Offer, *, bare: bool) -> None:
        assert plan.syntax is not None, "forms come from a syntax"
        self._source = source
        self._plan = plan
        self._syntax: CallSyntax = plan.syntax
        self._offer = offer
        self._bare = bare
        self._name = ""
        self._id = ""

    def maybe(self, part: Maybe) -> Reading[None]:
        """Read what may be missing."""
        first, *rest = part.parts
        if isinstance(first, Word) and (yield from literal(self._source, first.text)):
            for element in rest:
                if isinstance(element, Hole):
                    yield from self.hole(element.name, None)

    def hole(self, kind: str, following: Element | None) -> Reading[bool]:
        """Read what stands for a hole; False where arguments have begun and are broken.

        Raises:
            NotACall: something else comes.
        """
        source = self._source
        match kind:
            case "json":
                return (yield from json_calls(source, self._syntax, self._offer, only_offered=self._bare))
            case "python":
                return (yield from python_calls(source, self._offer))
            case "name":
                self._name = yield from word(source)
                if self._bare and not self._offer.has(self._name):
                    raise NotACall
            case "id":
                self._id = yield from word(source)
                match = _NUMBERED.fullmatch(self._id)
                self._name = match[1] if match else self._id
            case "call_id":
                self._id = yield from word(source)
            case "arguments":
                if (yield from peek(source)) != "{":
                    raise NotACall
                source.call(self._name, self._id)
                whole = yield from json_value(source, source.arguments)
                if whole:
                    source.end_call()
                return whole
            case "parameters":
                assert self._plan.parameter is not None, "a syntax with {parameters} says how one looks"
                ending = following.text if isinstance(following, Word) else ""
                return (
                    yield from tagged_parameters(
                        source, self._plan.parameter, self._offer, self._name, self._id, ending
                    )
                )
            case _:
                yield from word(source)
        return True
