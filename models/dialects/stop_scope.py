"""The parts of an answer in which stop strings do not count, as marks tell them in the text."""

import json
from collections.abc import Iterator, Sequence

from troupellm.models.dialects.plan import Form, plan_of
from troupellm.models.dialects.syntax import Channels, Dialect, Hole, Maybe, Word
from troupellm.protocol.sampling_extras import StopRegion, StopScope
from troupellm.protocol.tools import Tool

_ANY = ""
_FIRSTS = {"json": "{[", "named": "{[", "arguments": "{", "python": "["}


def stop_scope(dialect: Dialect, tools: Sequence[Tool], *, inside: bool | None) -> StopScope | None:
    """Thoughts and calls of a dialect; None where it has neither.

    Args:
        inside: whether the answer begins inside of thoughts; None where the prompt tells.
    """
    thinking = dialect.thinking
    if dialect.channels is not None:
        return StopScope(regions=tuple(_of_channels(dialect.channels)))
    regions: dict[str, StopRegion] = {}
    if thinking is not None:
        regions |= {opens: StopRegion(opens=opens, closes=thinking.closes) for opens in thinking.opens}
    for region in _of_calls(dialect, tools):
        regions.setdefault(region.opens, region)
    found = [mark for mark in regions if not any(mark != other and mark in other for other in regions)]
    if not found:
        return None
    return StopScope(
        regions=tuple([regions[mark] for mark in found]),
        opens=thinking.opens if thinking else (),
        closes=thinking.closes if thinking else (),
        always=thinking is not None and thinking.begins == "always",
        open=inside if thinking is not None else False,
    )


def _of_channels(channels: Channels) -> Iterator[StopRegion]:
    for channel in channels.thoughts:
        yield StopRegion(opens=f"{channels.channel}{channel}", closes=channels.ends)
    yield StopRegion(opens=f"to={channels.recipient}", closes=channels.ends)
    yield StopRegion(opens=f"{channels.channel}final", closes=(channels.message,))


def _of_calls(dialect: Dialect, tools: Sequence[Tool]) -> Iterator[StopRegion]:
    calls = dialect.calls
    if calls is None:
        return
    for opens, closes in [*([calls.section] if calls.section else []), *calls.sections]:
        yield StopRegion(opens=opens, closes=(closes,))
    plan = plan_of(dialect)
    for lead in sorted(plan.leads):
        forms = [form for form in plan.forms if form.lead == lead]
        closers = sorted(frozenset[str]().union(*(form.closers for form in forms)))
        yield StopRegion(opens=lead, closes=tuple(closers), firsts=_firsts(forms))
    if plan.bare is None:
        return
    for tool in tools:
        name = tool["function"]["name"]
        if calls.bare == "{python}":
            yield StopRegion(opens=f"[{name}(", closes=(")]",))
        elif calls.bare == "{json}":
            for gap in ("", " "):
                yield StopRegion(opens=f'{{"{calls.name_keys[0]}":{gap}{json.dumps(name)}')
        else:
            yield StopRegion(opens=f"{name}\n{{")


def _firsts(forms: Sequence[Form]) -> str:
    """The characters with which what follows a lead may begin; empty where any may."""
    found = ""
    for form in forms:
        parts = form.rest
        first = parts[0]
        if isinstance(first, Maybe) or (isinstance(first, Hole) and first.name not in _FIRSTS):
            return _ANY
        found += first.text[0] if isinstance(first, Word) else _FIRSTS[first.name]
    return found
