"""Descriptions of the syntax in which a model family writes reasoning and tool calls; data without behaviour.

A call is described by a template of the model's text, for example

    <tool_call>\\n{json}\\n</tool_call>

White space in a template is written by the model if a grammar guides it; a parser accepts any white space there, or
none. Holes:

    {json}        objects with name and arguments: one, several, or a list of them
    {named}       objects with the function's name as their only key: one, or a list of them
    {name}        name of the function, in any quotes behind "="
    {id}          "functions.name:0", which names the function and is the call's id
    {call_id}     the call's id
    {arguments}   a JSON object
    {parameters}  arguments in tags, each as a `parameter` template has it, with the holes {key}, {value} and {type}
    {pairs}       arguments as {key:value}, where texts stand between two `quote` marks
    {elements}    arguments in tags that have their names, each behind the `prefix` mark
    {python}      a list of Python calls with keyword arguments
    {lines}       such calls without brackets around them, one a line
    {word}        a word without meaning

Text between {? and ?} is optional. A \u2423 is one space that belongs to a mark.
"""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Final, Literal

import msgspec

IdStyle = Literal["hex", "alphanumeric", "numbered"]
"""call_ and 24 digits; nine letters and digits; functions.name:0."""

_HOLE: Final = re.compile(r"\{\?(.*?)\?\}|\{([a-z_]+)\}")
HOLES: Final = frozenset(
    {"json", "named", "name", "id", "call_id", "arguments", "parameters", "pairs", "elements", "python", "lines",
     "word", "key", "value", "type"}
)  # fmt: skip
_OPEN_SPACE: Final = "\u2423"
SUFFIX: Final = "{suffix}"
"""Placeholder in marks for the suffix that a tokenizer adds to its own; see `with_suffix`."""


class Word(msgspec.Struct, frozen=True):
    """Text that stands in a template, without white space."""

    text: str


class Hole(msgspec.Struct, frozen=True):
    name: str


class Maybe(msgspec.Struct, frozen=True):
    """Begins with a word, and is left out where that does not come."""

    parts: "tuple[Element, ...]"


Element = Word | Hole | Maybe


class OwnCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as the family's chat template renders it, for a grammar. All white space counts."""

    call: str
    """With {name} and {arguments}."""
    argument: str
    """Of one argument, with {key}, {value} and perhaps {type}."""
    between: str = ""
    """Between two arguments."""
    quote: str = ""
    """Around texts, also of those in lists and objects."""
    values: Literal["plain", "json", "python"] = "plain"
    """plain: texts have no quotes, or those of `quote`. json: every value is JSON. python: with Python's constants."""
    nested: bool = False
    """Lists and objects have tags of their own."""
    around: tuple[str, str, str] | None = None
    """The texts before, between and behind calls, if they are not those of `Written`. Then one answer has calls of
    this form only, or none."""
    types: Literal["flag", "name"] = "name"
    """{type} is true for a text and false for all else; or the name of the JSON type."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """The text that a grammar makes the model write."""

    call: str
    """A template without parts that may be missing; {json} is one object."""
    own: tuple[OwnCall, ...] = ()
    """The family's own form of a call, where that is no JSON; several where its versions differ in white space. `call`
    is for tools whose schema this form cannot hold."""
    before: str = ""
    between: str = ""
    after: str = ""


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """The syntax of calls."""

    forms: tuple[str, ...]
    """Templates of one call (or of all of them, with {json} and {python}). Where several begin alike, the character
    that follows decides."""
    written: Written
    section: tuple[str, str] | None = None
    """Marks around all calls together."""
    sections: tuple[tuple[str, str], ...] = ()
    """Other spellings of these, which models of the family write too."""
    bare: str = ""
    """A template without marks, that counts at the start of an answer when it names a tool on offer."""
    bare_lines: bool = False
    """`bare` also counts at the start of a line, if the line begins with "{"."""
    unsure: tuple[str, ...] = ()
    """First marks that other texts have too: the text after one counts as a call if it names a tool on offer."""
    parameter: str = ""
    parameters: tuple[str, ...] = ()
    """Other spellings of `parameter`."""
    block: str = ""
    """A template of a JSON object with all arguments, which may stand in the place of {parameters}."""
    quote: str = ""
    """The mark before and behind a text in {pairs}."""
    prefix: str = ""
    """The mark before every tag of {elements}."""
    entities: bool = False
    """Names and keys are written with &quot; and &amp;."""
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    """A grammar writes the first one of each."""
    ids: IdStyle = "hex"


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """The marks that separate reasoning from the answer."""

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    begins: Literal["marked", "always"] = "marked"
    """marked: at an opening mark, at the start of the answer or the end of the prompt. always: the answer begins with
    reasoning, unless the prompt has closed it already."""
    anywhere: bool = False
    """Reasoning may also come between other text."""
    header: tuple[str, str] | None = None
    """Marks that begin and end a message's header. The first of `opens` is what a header of reasoning says."""
    default_on: bool = True
    """The model thinks unless thinking is turned off."""
    drops: tuple[str, ...] = ()
    """Marks around the answer that are not shown."""
    off_effort: str = "none"
    """The reasoning effort with which the chat template turns it off."""
    switches: tuple[str, ...] = ("enable_thinking", "thinking")
    """Variables of the chat template that turn it on and off."""


class Channels(msgspec.Struct, frozen=True, kw_only=True):
    """Harmony: a text of messages, each with a header that names a channel and perhaps a recipient."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|return|>", "<|call|>")
    """Behind a message that others follow, behind the answer, behind a call."""
    reasoning: tuple[str, ...] = ("analysis",)
    recipient: str = "functions."
    opening: str = "<|start|>assistant"
    """The first words of a message, with which a prompt ends."""
    call: str = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
    """The text that a grammar allows behind the opening."""


class ChatSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one model's answers that the parser recognises."""

    thinking: Thinking | None = None
    calls: CallSyntax | None = None
    channels: Channels | None = None
    """Describes every kind of message; the other two are for texts without channels."""


def elements(template: str) -> tuple[Element, ...]:
    """The parts of a template.

    Raises:
        ValueError: an unknown hole.
    """
    parts: list[Element] = []
    position = 0
    for match in _HOLE.finditer(template):
        _add_words(parts, template[position : match.start()])
        if match[1] is not None:
            parts.append(Maybe(elements(match[1])))
        elif match[2] in HOLES:
            parts.append(Hole(match[2]))
        else:
            raise ValueError(f"a template of calls has no hole {{{match[2]}}}")
        position = match.end()
    _add_words(parts, template[position:])
    return tuple(parts)


def _add_words(parts: list[Element], text: str) -> None:
    parts.extend(Word(word.replace(_OPEN_SPACE, " ")) for word in text.split())


def words(parts: tuple[Element, ...]) -> list[str]:
    """All words of a template."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, Word):
            found.append(part.text)
        elif isinstance(part, Maybe):
            found += words(part.parts)
    return found


def marks_of(chat_syntax: ChatSyntax) -> list[str]:
    """All marks of a chat syntax, wherever they may stand."""
    found: list[str] = []
    calls, thinking, channels = chat_syntax.calls, chat_syntax.thinking, chat_syntax.channels
    if calls is not None:
        found += [*(calls.section or ()), *chain(*calls.sections), calls.quote, calls.prefix]
        for template in (*calls.forms, calls.bare, calls.block, calls.parameter, *calls.parameters):
            found += words(elements(template))
    if thinking is not None:
        found += [*thinking.opens, *thinking.closes, *thinking.drops, *(thinking.header or ())]
    if channels is not None:
        found += [channels.start, channels.channel, channels.constrain, channels.message, *channels.ends]
    return [mark for mark in found if mark]


def with_suffix(chat_syntax: ChatSyntax, suffix: str) -> ChatSyntax:
    """The chat syntax with `SUFFIX` in its marks replaced."""
    if not any(SUFFIX in mark for mark in _texts(msgspec.to_builtins(chat_syntax))):
        return chat_syntax
    return msgspec.convert(_replaced(msgspec.to_builtins(chat_syntax), suffix), ChatSyntax)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_texts, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_texts, value))


def _replaced(value: object, suffix: str) -> object:
    if isinstance(value, str):
        return value.replace(SUFFIX, suffix)
    if isinstance(value, dict):
        return {key: _replaced(entry, suffix) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(entry, suffix) for entry in value]
    return value
