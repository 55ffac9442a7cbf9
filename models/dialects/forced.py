"""Calls that a model must make, or must make well: guides from a dialect's syntax and each tool's schema."""

import json
from typing import Any, Final

from troupellm.models.dialects.syntax import CallSyntax, Channels, Dialect, Written
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.guide import GuideSpec
from troupellm.protocol.tools import Tool, ToolUse

Format = dict[str, Any]
_NUMBER: Final = "[0-9]{1,4}"


def calls_guide(dialect: Dialect, use: ToolUse, *, after: str) -> GuideSpec | None:
    """What makes an answer call tools; None where it is left to the model.

    Args:
        after: the text that ends thinking, where the model thinks first.

    Raises:
        InvalidRequest: calls must be made, and the model has no syntax for them.
    """
    if not use.tools or not (use.required or use.strict):
        return None
    if dialect.channels is None and dialect.calls is None:
        if not use.required:
            return None
        raise InvalidRequest(
            "tool_choice: this model has no known syntax of tool calls; the server must name one with"
            " --tool-call-parser",
            param="tool_choice",
            code="unsupported_parameter",
        )
    written, syntax = _written(dialect)
    tags = [_tag(written, syntax, tool, free=not use.required and _name(tool) not in use.strict) for tool in use.tools]
    format_ = _required(written, tags, parallel=use.parallel) if use.required else _optional(written, tags)
    if format_ is None:
        return None
    return GuideSpec(
        kind="structural_tag",
        source=json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False),
        after=after,
        field="tools",
    )


def _written(dialect: Dialect) -> tuple[Written, CallSyntax | None]:
    if dialect.channels is not None:
        return _harmony(dialect.channels), None
    assert dialect.calls is not None, "one of both"
    return dialect.calls.written, dialect.calls


def _harmony(channels: Channels) -> Written:
    return Written(call=channels.call, between=channels.ends[-1])


def _required(written: Written, tags: list[Format], *, parallel: bool) -> Format:
    calls: Format = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": written.between,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    around = [_text(written.before), calls, _text(written.after)]
    elements = [element for element in around if element is not None]
    return calls if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _optional(written: Written, tags: list[Format]) -> Format | None:
    """Free text in which each call fits; None where calls have no mark of their own, so that a text may begin alike."""
    first = tags[0]["begin"]
    shared = next((length for length in range(len(first), 0, -1) if _all_begin(tags, first[:length])), 0)
    trigger = first[:shared].partition("\n")[0].partition('{"')[0].rstrip()
    if not trigger or trigger[0] not in "<[" or written.before:
        return None
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}


def _all_begin(tags: list[Format], text: str) -> bool:
    return all(tag["begin"].startswith(text) for tag in tags)


def _tag(written: Written, syntax: CallSyntax | None, tool: Tool, *, free: bool) -> Format:
    """One function's call: what stands before its arguments, their schema, what stands behind."""
    name = _name(tool)
    schema = {"type": "object"} if free else tool["function"]["parameters"]
    schema = {"type": "object", **schema}
    before, after = _around(written.call, syntax, name)
    content: Format = {"type": "json_schema", "json_schema": schema}
    head, hole, tail = before.partition("{id}")
    if hole:
        number = {"type": "regex", "pattern": _NUMBER}
        elements = [number, {"type": "const_string", "value": tail}, content]
        return {"type": "tag", "begin": f"{head}functions.{name}:", "content": _sequence(elements), "end": after}
    return {"type": "tag", "begin": before, "content": content, "end": after}


def _around(template: str, syntax: CallSyntax | None, name: str) -> tuple[str, str]:
    """The text of a template before and behind the arguments."""
    if "{json}" in template:
        assert syntax is not None, "channels have no objects with names"
        before, _, after = template.partition("{json}")
        head = f'{{"{syntax.name_keys[0]}": {json.dumps(name)}, "{syntax.argument_keys[0]}": '
        return before + head, "}" + after
    before, _, after = template.partition("{arguments}")
    return before.replace("{name}", name), after


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements}


def _text(value: str) -> Format | None:
    return {"type": "const_string", "value": value} if value else None


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name
