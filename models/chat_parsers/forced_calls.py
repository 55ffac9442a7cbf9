"""Calls that a model must make, or must make well: guides from a chat syntax's syntax and each tool's schema."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from troupellm.models.chat_parsers.forced_arguments import MOST_TAGS, number_of_tags, own_arguments
from troupellm.models.chat_parsers.syntax import CallSyntax, Channels, ChatSyntax, OwnCall, Written
from troupellm.models.structured_outputs.schema_normalise import CONSTRAINING, without_unique_items
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.guide import EarlyEnd, GuideSpec
from troupellm.protocol.params.tools import Tool, ToolUse

Format = dict[str, Any]
ReasoningPairs = Sequence[tuple[str, str]]
"""Marks that open reasoning, each with the one that ends them."""
_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""Characters that must be escaped in a regular expression."""
_DECLARING: Final = frozenset({"type", "properties", "required", "additionalProperties"})
_NUMBER: Final = "[0-9]{1,4}"
_NO_OBJECT: Final = r"(\s*[^{\s](?s:.*))?"


def calls_guide(
    chat_syntax: ChatSyntax, use: ToolUse, *, after: str, marks: ReasoningPairs = (), reasoning: bool = True
) -> GuideSpec | None:
    """The guide that makes an answer call tools; None if the model is free to decide.

    Args:
        after: the text that ends thinking, where the model thinks first.
        marks: around the reasoning that may come first.
        reasoning: it may come first where it is a channel.

    Raises:
        InvalidRequest: calls must be made, and the model has no syntax for them.
    """
    if not use.tools or not (use.required or use.strict):
        return None
    if chat_syntax.calls is None and not use.required:
        return None  # channels have marks that free text would not be allowed
    if chat_syntax.channels is None and chat_syntax.calls is None:
        raise InvalidRequest(
            "tool_choice: this model has no known syntax of tool calls; the server must name one with"
            " --tool-call-parser",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if chat_syntax.channels is not None and use.required:
        format_, after = _in_channels(chat_syntax.channels, use, reasoning=reasoning), ""
    else:
        written, syntax = _written(chat_syntax)
        free = {_name(tool): not use.required and _name(tool) not in use.strict for tool in use.tools}
        written, tags = _tags(written, syntax, use, free)
        write = _required if use.required else _optional
        found = write(written, tags, parallel=use.parallel)
        if found is None:
            return None
        format_ = found
    return GuideSpec(
        kind="structural_tag",
        source=_source(_behind_reasoning(format_, marks)),
        after=after,
        field="tools",
    )


def calls_or(chat_syntax: ChatSyntax, use: ToolUse, guide: GuideSpec) -> GuideSpec:
    """A guide for the answer, with calls of the tools on offer instead where the model wants that."""
    if (channels := chat_syntax.channels) is not None:  # a call is a message before the answer's channel
        early = EarlyEnd(
            token=channels.ends[-1],
            starts=(channels.start, channels.channel),
            opens=channels.message,
            ends=channels.ends,
            recipient=f"to={channels.recipient}",
        )
        return msgspec.structs.replace(guide, early_end=early)
    if chat_syntax.calls is None:
        return guide
    plain = _format_of(guide) or _inner_format(guide)
    written, syntax = _written(chat_syntax)
    free = {_name(tool): _name(tool) not in use.strict for tool in use.tools}
    written, tags = _tags(written, syntax, use, free)
    either = {"type": "or", "elements": [_required(written, tags, parallel=use.parallel), plain]}
    return msgspec.structs.replace(guide, kind="structural_tag", source=_source(either))


def may_think(guide: GuideSpec, marks: ReasoningPairs) -> GuideSpec | None:
    """A guide for an answer that may begin with reasoning; None where it cannot be put behind others.

    Args:
        marks: around the reasoning.
    """
    plain = _format_of(guide)
    if plain is None and guide.kind == "structural_tag":
        tag = _loaded(guide)
        plain = tag.get("format") if isinstance(tag, dict) else None
    if not isinstance(plain, dict):
        return None
    return msgspec.structs.replace(guide, kind="structural_tag", source=_source(_behind_reasoning(plain, marks)))


def _behind_reasoning(format_: Format, marks: ReasoningPairs) -> Format:
    """A form, or reasoning and then the form: the first token decides between the two."""
    if not marks:
        return format_
    tags = [{"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end} for begin, end in marks]
    reasoning: Format = {"type": "tags_with_separator", "tags": tags, "separator": "", "stop_after_first": True}
    return _sequence([reasoning, format_])


def _inner_format(guide: GuideSpec) -> Format:
    """The format of a structural tag. Raises InvalidRequest: the older form, which has no such part."""
    tag = _loaded(guide)
    found = tag.get("format") if isinstance(tag, dict) else None
    if not isinstance(found, dict):
        raise InvalidRequest(
            f"{guide.field}: beside tools a structural tag must have a format",
            param=guide.field,
            code="unsupported_parameter",
        )
    return found


def _format_of(guide: GuideSpec) -> Format | None:
    """A guide as part of a structural tag; None where it has no such form."""
    match guide.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": _loaded(guide)}
        case "regex":
            return {"type": "regex", "pattern": guide.source}
        case "choice":
            words = "|".join(_SPECIAL.sub(r"\\\g<0>", word) for word in _loaded(guide))
            return {"type": "regex", "pattern": f"(?:{words})"}
        case "grammar":
            return {"type": "grammar", "grammar": guide.source}
        case _:
            return None


def _loaded(guide: GuideSpec) -> Any:
    try:
        return json.loads(guide.source)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{guide.field} is no JSON", param=guide.field, code="invalid_schema") from None


def _source(format_: Format) -> str:
    return json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False)


def _written(chat_syntax: ChatSyntax) -> tuple[Written, CallSyntax | None]:
    if chat_syntax.channels is not None:
        return Written(call=chat_syntax.channels.call), None
    assert chat_syntax.calls is not None, "one of both"
    return chat_syntax.calls.written, chat_syntax.calls


def _in_channels(channels: Channels, use: ToolUse, *, reasoning: bool) -> Format:
    """One call, since the mark at its end also ends the answer; perhaps behind reasoning.

    The prompt ends with the first words of a message, so only a second message has them.
    """
    written = Written(call=channels.call)
    tags = [_tag(written, None, tool, free=False, strict=_name(tool) in use.strict) for tool in use.tools]
    thinking: Format = {
        "type": "tag",
        "begin": f"{channels.channel}{channels.reasoning[0]}{channels.message}",
        "content": {"type": "any_text"},
        "end": f"{channels.ends[0]}{channels.opening}",
    }
    call: Format = {"type": "or", "elements": tags}
    return {"type": "or", "elements": [_sequence([thinking, call]), call]} if reasoning else call


def _required(written: Written, tags: list[Format], *, parallel: bool) -> Format:
    calls = _row(written, tags, parallel=parallel)
    around = [_text(written.before), calls, _text(written.after)]
    elements = [element for element in around if element is not None]
    return calls if len(elements) == 1 else _sequence(elements)


def _row(written: Written, tags: list[Format], *, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": written.between,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _optional(written: Written, tags: list[Format], *, parallel: bool) -> Format | None:
    """Free text in which each call fits; None if it could not be distinguished from a call."""
    if written.before:
        calls = _row(written, tags, parallel=parallel)
        tag: Format = {"type": "tag", "begin": written.before, "content": calls, "end": written.after}
        return {"type": "triggered_tags", "triggers": [written.before.split()[0]], "tags": [tag]}
    if written.call == "{json}":
        text: Format = {"type": "regex", "pattern": _NO_OBJECT}
        return {"type": "or", "elements": [_required(written, tags, parallel=parallel), text]}
    trigger = written.call.partition("{")[0].partition("\n")[0].rstrip()
    if not trigger or trigger[0] not in "<[":
        return None
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}


def _tags(
    written: Written, syntax: CallSyntax | None, use: ToolUse, free: Mapping[str, bool]
) -> tuple[Written, list[Format]]:
    """Each function's call, in the family's own form where that can hold its schema, and the texts around the calls.

    Args:
        free: by name; the arguments may be any object.
    """
    schemas = {_name(tool): tool["function"]["parameters"] for tool in use.tools}
    own = {name: _own_tags(written, name, schema) for name, schema in schemas.items() if not free[name]}
    if sum(number_of_tags(tag) for tags in own.values() for tag in tags) > MOST_TAGS:
        own = {}
    around = written.own[0].around if written.own else None
    if around is not None:
        if all(own.get(name) for name in schemas):
            before, between, after = around
            written = Written(call=written.own[0].call, before=before, between=between, after=after)
        else:
            own = {}
    tags = list[Format]()
    for tool in use.tools:
        name = _name(tool)
        tags += own.get(name) or [_tag(written, syntax, tool, free=free[name], strict=name in use.strict)]
    return written, tags


def _own_tags(written: Written, name: str, schema: Mapping[str, Any]) -> list[Format]:
    """A function's call in the versions of the family's own form; none where the schema asks for more."""
    return [_own_tag(own, name, arguments) for own in written.own for arguments in own_arguments(own, schema)]


def _own_tag(own: OwnCall, name: str, arguments: list[Format]) -> Format:
    """The arguments between two fixed texts, or only these."""
    before, _, after = own.call.replace("{name}", name).partition("{arguments}")
    if not arguments:
        return {"type": "tag", "begin": before, "content": {"type": "const_string", "value": after}, "end": ""}
    return {"type": "tag", "begin": before, "content": _sequence(arguments), "end": after}


def _tag(written: Written, syntax: CallSyntax | None, tool: Tool, *, free: bool, strict: bool) -> Format:
    """One function's call: the text before its arguments, their schema, and the text after them.

    Args:
        strict: all of the schema is to hold; else `uniqueItems`, which no grammar can hold, is left to the model.
    """
    name = _name(tool)
    schema = {"type": "object"} if free else _closed(tool["function"]["parameters"])
    if not strict:
        schema = without_unique_items(schema)
    schema = {"type": "object", **schema}
    before, after = _around(written.call, syntax, name)
    content: Format = {"type": "json_schema", "json_schema": schema}
    head, hole, tail = before.partition("{id}")
    if hole:
        number = {"type": "regex", "pattern": _NUMBER}
        elements = [number, {"type": "const_string", "value": tail}, content]
        return {"type": "tag", "begin": f"{head}functions.{name}:", "content": _sequence(elements), "end": after}
    return {"type": "tag", "begin": before, "content": content, "end": after}


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function that declares no arguments admits none, unless it says which may come."""
    if schema.get("properties") != {} or (schema.keys() & CONSTRAINING) - _DECLARING:
        return schema
    return {"additionalProperties": False, **schema}


def _around(template: str, syntax: CallSyntax | None, name: str) -> tuple[str, str]:
    """The text of a template before and behind the arguments."""
    if "{json}" in template:
        assert syntax is not None, "channels have no objects with names"
        before, _, after = template.partition("{json}")
        head = f'{{"{syntax.name_keys[0]}": {json.dumps(name)}, "{syntax.argument_keys[0]}": '
        return before + head, "}" + after
    if "{named}" in template:
        before, _, after = template.partition("{named}")
        return f"{before}{{{json.dumps(name)}: ", "}" + after
    before, _, after = template.partition("{arguments}")
    return before.replace("{name}", name), after


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements}


def _text(value: str) -> Format | None:
    return {"type": "const_string", "value": value} if value else None


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name
