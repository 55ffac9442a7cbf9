"""The parts of an answer in which stop strings do not count; marks in the text delimit them."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from troupellm.models.chat_parsers.compiled_syntax import Form, plan_of
from troupellm.models.chat_parsers.syntax import Channels, ChatSyntax, Hole, Word
from troupellm.protocol.params.sampling_checks import StopRegion, StopScope
from troupellm.protocol.params.tools import NAME, Tool

Place = Literal["any", "start", "answer"]
_ADDRESS: Final = "to="
_FIRSTS = {"json": "{[", "named": "{[", "arguments": "{", "python": "["}


def stop_scope(chat_syntax: ChatSyntax, tools: Sequence[Tool], *, inside: bool | None) -> StopScope | None:
    """Reasoning and calls of a chat syntax; None where it has neither.

    Args:
        inside: whether the answer begins inside of reasoning; None where the prompt tells.
    """
    thinking = chat_syntax.thinking
    if chat_syntax.channels is not None:
        return StopScope(regions=tuple(_of_channels(chat_syntax.channels, tools)))
    regions: dict[str, StopRegion] = {}
    if thinking is not None:
        at: Place = "any" if thinking.anywhere or thinking.header else "start"
        regions |= {opens: StopRegion(opens=opens, closes=thinking.closes, at=at) for opens in thinking.opens}
    for region in _of_calls(chat_syntax, tools):
        regions.setdefault(region.opens, region)
    marks = [region.opens for region in regions.values() if region.at == "any"]
    parts = {mark for mark in marks if any(mark != other and mark in other for other in marks)}
    found = [region for region in regions.values() if region.opens not in parts]
    if not found:
        return None
    return StopScope(
        regions=tuple(found),
        opens=thinking.opens if thinking else (),
        closes=thinking.closes if thinking else (),
        always=thinking is not None and thinking.begins == "always",
        open=inside if thinking is not None else False,
    )


def _of_channels(channels: Channels, tools: Sequence[Tool]) -> Iterator[StopRegion]:
    """Messages, whose headers may begin without a mark where the prompt has begun them."""
    silent = _silent_headers(channels, [tool["function"]["name"] for tool in tools])
    body = (channels.start, channels.channel, *channels.ends)
    places: list[tuple[str, Place]] = [(channels.start, "any"), (channels.channel, "any"), (_ADDRESS, "start")]
    for opens, at in places:
        yield StopRegion(opens=opens, closes=body, at=at, header=channels.message, silent=silent)


def _silent_headers(channels: Channels, names: Sequence[str]) -> str:
    """A pattern of the headers of reasoning, and of calls if there are tools."""
    mark, constrain = re.escape(channels.channel), re.escape(channels.constrain)
    reasoning = "|".join(map(re.escape, channels.reasoning))
    patterns = [rf"{mark}\s*(?:{reasoning})(?=\s|$)(?!.*{mark})"]
    if names:
        prefix, known = re.escape(channels.recipient), "|".join(map(re.escape, names))
        patterns.append(rf"\b{_ADDRESS}(?:{prefix}{NAME.pattern}|(?:{known})(?:json)?)(?=\s|$|{mark}|{constrain})")
    return "|".join(patterns)


def _of_calls(chat_syntax: ChatSyntax, tools: Sequence[Tool]) -> Iterator[StopRegion]:
    calls = chat_syntax.calls
    if calls is None:
        return
    names = [tool["function"]["name"] for tool in tools]
    for opens, closes in [*([calls.section] if calls.section else []), *calls.sections]:
        yield StopRegion(opens=opens, closes=(closes,))
    plan = plan_of(chat_syntax)
    for lead in sorted(plan.leads):
        forms = [form for form in plan.forms if form.lead == lead]
        closers = sorted(frozenset[str]().union(*(form.closers for form in forms)))
        firsts, named = _beginnings(forms)
        yield StopRegion(opens=lead, closes=tuple(closers), firsts=firsts, names=tuple(names) if named else ())
    if plan.bare is None:
        return
    at: Place = "any" if calls.bare_lines else "answer"
    for name in names:
        if calls.bare == "{python}":
            yield StopRegion(opens=f"[{name}(", closes=(")]",), at=at)
        elif calls.bare == "{json}":
            for gap in ("", " "):
                yield StopRegion(opens=f'{{"{calls.name_keys[0]}":{gap}{json.dumps(name)}', at=at)
        else:
            yield StopRegion(opens=f"{name}\n{{", at=at)


def _beginnings(forms: Sequence[Form]) -> tuple[str, bool]:
    """The characters with which what follows a lead may begin, and whether it may be a name; neither where anything may
    follow."""
    found, named = "", False
    for form in forms:
        first = form.rest[0]
        if isinstance(first, Word):
            found += first.text[0]
        elif isinstance(first, Hole) and first.name == "name":
            named = True
        elif isinstance(first, Hole) and first.name in _FIRSTS:
            found += _FIRSTS[first.name]
        else:
            return "", False
    return found, named
