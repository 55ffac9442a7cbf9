"""The one parser: runs a chat syntax's description over the text of an answer, which comes in pieces of any size.

Text that is not a call stays content, and no model output raises an exception. The same text gives the same result in
the end, for any division into pieces.
"""

import logging
from collections.abc import Collection
from typing import Final

from troupellm.models.chat_parsers.compiled_syntax import LINE, Form, Plan
from troupellm.models.chat_parsers.form_reader import FormReader
from troupellm.models.chat_parsers.harmony import read_channels
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.prompt_start import Start
from troupellm.models.chat_parsers.syntax import Maybe, Thinking, Word
from troupellm.models.chat_parsers.text_stream import (
    MOST_CALLS,
    MOST_TRIED,
    NewId,
    NotACall,
    Reading,
    Source,
    comes,
    literal,
    peek,
    spaces,
)
from troupellm.models.chat_parsers.until_marker import LEAST_SHOWN, Found, Marks, raw_until, text_until
from troupellm.protocol.params.chat_events import Content, ParsedPiece

logger = logging.getLogger("troupellm.models")

NO_LIMIT: Final = 1 << 30
MOST_TRIALS: Final = 512
"""Beginnings of calls in one answer; each costs some ten microseconds."""
MOST_HEADER: Final = 256
"""Characters of a message's header that are looked at."""


class Parser:
    """Follows the text of one answer. See `actors.turn.ChoiceParser`."""

    def __init__(
        self,
        plan: Plan,
        *,
        offered_tools: OfferedTools,
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
            forced: a guide lets through nothing but calls behind the reasoning: what is left over at the end is the
                beginning of one, and is not shown.
            channel: where there are channels, the one of the message that the prompt ends with.
        """
        self._source = Source(new_id, most_calls, offered_tools.wrapper)
        if plan.channels is not None:
            self._steps = read_channels(
                self._source, plan.channels, offered_tools, with_calls=with_calls, region=channel
            )
        else:
            self._steps = _read(self._source, plan, offered_tools, start)
        self._forced = forced
        self._over = False

    @property
    def has_whole_calls(self) -> bool:
        """There are calls, and the last one has all its arguments."""
        return self._source.calls > 0 and self._source.whole

    @property
    def state(self) -> tuple[str, str, int]:
        """The region being read, the text held back, and the number of calls so far."""
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
        """Return the text that was held back; the answer has ended.

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
            if source.trying:
                source.reject()
            source.content(source.give_up() + source.text[source.pos :])
            source.text, source.pos = "", 0


def _read(source: Source, plan: Plan, offered_tools: OfferedTools, start: Start) -> Reading[None]:
    """A whole answer."""
    thinking, mark = plan.thinking, ""
    if thinking is not None:
        if thinking.header is not None and start != "answer" and (yield from _header_comes(source, thinking.header)):
            mark = thinking.header[0]
        elif (yield from _begins_with_reasoning(source, thinking, start)):
            mark = yield from _think(source, plan, offered_tools)
    source.region = "content"
    trials, behind = 0, False
    if not mark and not source.calls and plan.bare is not None:
        mark = yield from _call(source, plan, offered_tools, plan.bare, gap="")
    while True:
        gap = ""
        if not mark:
            marks = _content_marks(source, plan, trials)
            found = yield from text_until(source, marks, source.content, 1 if behind else LEAST_SHOWN)
            if found is None:
                return
            mark, gap = found.mark, found.gap
            behind = True
        if mark in plan.leads:
            trials += 1
            mark = yield from _call(source, plan, offered_tools, mark, gap=gap)
            source.region = "content"
            continue
        if mark == LINE and plan.bare is not None:
            trials += 1
            source.back(1)
            mark = yield from _call(source, plan, offered_tools, plan.bare, gap=f"{gap}\n")
            source.region = "content"
            continue
        reasoning = mark in plan.opens
        if plan.header is not None and mark == plan.header[0]:
            reasoning = yield from _header(source, plan)
        if reasoning:
            mark = yield from _think(source, plan, offered_tools)
            source.region = "content"
        elif source.calls or mark in plan.drops or mark in plan.begins:
            mark = ""
            yield from spaces(source)
        else:
            mark = ""


def _content_marks(source: Source, plan: Plan, trials: int) -> Marks:
    if source.calls >= MOST_CALLS or trials >= MOST_TRIALS:
        return plan.beyond
    return plan.after_call if source.calls else plan.content


def _begins_with_reasoning(source: Source, thinking: Thinking, start: Start) -> Reading[bool]:
    """True if reasoning comes first; consumes its opening mark."""
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


def _header_comes(source: Source, header: tuple[str, str]) -> Reading[bool]:
    """True if the text continues a message's header, which the prompt has begun."""
    source.attempt()
    yield from spaces(source)
    for beginning in ("to=", header[1]):
        if (yield from comes(source, beginning)):
            source.commit()
            return True
    source.content(source.give_up())
    return False


def _header(source: Source, plan: Plan) -> Reading[bool]:
    """Read the rest of a message's header; returns True if the message is a thought."""
    assert plan.thinking is not None, "a header belongs to thoughts"
    assert plan.header is not None, "the mark is in the plan"
    parts: list[str] = []
    mark = yield from raw_until(source, Marks([plan.header[1]]), lambda text: parts.append(text[:MOST_HEADER]))
    said = "".join(parts)[-MOST_HEADER:] + mark
    yield from spaces(source)
    return said.endswith(plan.thinking.opens)


def _think(source: Source, plan: Plan, offered_tools: OfferedTools) -> Reading[str]:
    """Reasoning. A whole call of a tool on offer ends it too; gives the mark that begins another message."""
    source.region = "reasoning"
    yield from spaces(source)
    trials = 0
    while True:
        marks = plan.reasoning if trials < MOST_TRIALS and source.tried < MOST_TRIED else plan.only_reasoning
        found = yield from text_until(source, marks, source.reasoning)
        if found is None:
            return ""
        if found.mark in plan.ends:
            yield from spaces(source)
            return ""
        if plan.header is not None and found.mark == plan.header[0]:
            return found.mark
        if found.mark in plan.drops:
            continue
        if found.mark in plan.begins:
            trials += 1
            if (yield from _call_in_reasoning(source, plan, offered_tools, found)):
                yield from spaces(source)
                return ""
            source.reasoning(found.gap if found.mark in plan.hidden else found.gap + found.mark)


def _call_in_reasoning(source: Source, plan: Plan, offered_tools: OfferedTools, found: Found) -> Reading[bool]:
    """True if a whole call of an offered tool follows the mark; otherwise its text is put back to be read again."""
    source.begin_trial(offered_tools.has)
    before, mark = source.calls, found.mark
    try:
        if mark not in plan.leads:
            yield from spaces(source)
            mark = yield from _lead(source, plan)
        source.attempt()
        yield from _read_call(source, plan, offered_tools, mark)
        good = source.calls > before and source.whole and not source.repaired
    except NotACall:
        good = False
    if good:
        source.accept()
    else:
        source.reject()
    return good


def _lead(source: Source, plan: Plan) -> Reading[str]:
    """The first mark of a call.

    Raises:
        NotACall: none comes.
    """
    for lead in sorted(plan.leads):
        if (yield from literal(source, lead)):
            return lead
    raise NotACall


def _call(source: Source, plan: Plan, offered_tools: OfferedTools, lead: "str | Form", *, gap: str) -> Reading[str]:
    """Read the call that a lead announces, or one at the start of an answer; return the next lead if one has ended it.

    Text that turns out to be no call is content. If a limit ended the text before the arguments, the marks are not
    shown, and a whole name is a call without arguments.
    """
    source.region = "call"
    source.attempt(gap, "" if isinstance(lead, Form) else lead)
    calls = source.calls
    try:
        mark = yield from _read_call(source, plan, offered_tools, lead)
    except NotACall:
        cut, (name, call_id) = source.ran_out and source.attempting, source.named
        text = source.give_up()
        if cut:
            text += source.take(len(source.text) - source.pos)
        if cut and name:
            source.call(name, call_id)
        elif not cut or not _is_head(text.strip(), plan):
            for hidden in plan.hidden:
                text = text.replace(hidden, "")
            source.content(text)
        return ""
    if source.calls > calls:
        yield from spaces(source)
    return mark


def _is_head(text: str, plan: Plan) -> bool:
    """True if a text begins with a call's first mark, or is an unambiguous beginning of one."""
    sure = plan.leads.difference(plan.syntax.unsure) if plan.syntax is not None else plan.leads
    return any(text.startswith(lead) or (len(text) >= LEAST_SHOWN and lead.startswith(text)) for lead in sure)


def _read_call(source: Source, plan: Plan, offered_tools: OfferedTools, lead: "str | Form") -> Reading[str]:
    """
    Raises:
        NotACall: the text is something else.
    """
    yield from spaces(source)
    if isinstance(lead, Form):
        for mark in sorted(plan.leads):
            if (yield from literal(source, mark)):
                lead = mark
                yield from spaces(source)
                break
    character = yield from peek(source)
    form = lead if isinstance(lead, Form) else _choose(plan.forms, lead, character)
    only_offered = isinstance(lead, Form) or (plan.syntax is not None and lead in plan.syntax.unsure)
    return (yield from _form(source, plan, offered_tools, form, only_offered=only_offered))


def _choose(forms: Collection[Form], lead: str, character: str) -> Form:
    for form in forms:
        if form.lead == lead and character and form.takes(character):
            return form
    raise NotACall


def _form(source: Source, plan: Plan, offered_tools: OfferedTools, form: Form, *, only_offered: bool) -> Reading[str]:
    """The rest of a template; gives the lead that ended it too early.

    Raises:
        NotACall: the text is something else.
    """
    reader = FormReader(source, plan, offered_tools, only_offered=only_offered)
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
        if not (yield from reader.hole(part.name, form.rest, index)):
            found = yield from text_until(source, plan.broken, source.arguments)
            return found.mark if found is not None and found.mark in plan.leads else ""
    return ""
