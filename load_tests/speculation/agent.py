"""Turns of an agent that does the same work in every round, each time with other files, numbers, people and places.

The form of its calls repeats: the tool's name, the keys, the brackets. The values are
new, and stand in its prompt alone. One round's turns asked again word for word are the best case there is for
drafts out of past outputs.
"""

import json
import random
from collections.abc import Callable

from troupellm.load_tests.speculation import words
from troupellm.load_tests.speculation.chat_text import prompt_of
from troupellm.load_tests.speculation.question import Question

Values = dict[str, str | int]
Draw = Callable[[random.Random], str | int]


def _file(source: random.Random) -> str:
    return f"{source.choice(words.WORDS)}_{source.choice(words.ITEMS)}.txt"


def _line(source: random.Random) -> int:
    return source.randint(1, 99)


def _name(source: random.Random) -> str:
    return source.choice(words.NAMES)


def _city(source: random.Random) -> str:
    return source.choice(words.CITIES)


TOOLS: dict[str, dict[str, Draw]] = {
    "read_file": {"path": _file, "line": _line},
    "move_file": {"path": _file, "target": _file},
    "send_report": {"path": _file, "name": _name},
}
RECORDS: dict[str, dict[str, Draw]] = {
    "{name} is {age} years old and lives in {city}.": {"name": _name, "age": _line, "city": _city},
    "{name} meets {friend} in {city} at {hour} o'clock.": {
        "name": _name, "friend": _name, "city": _city, "hour": _line,
    },
}  # fmt: skip
_TYPES = {str: "string", int: "integer"}


def agent_turns(count: int, round_number: int, seed: int = 7) -> list[Question]:
    """`count` turns, tool calls and JSON by turns: those of another round are alike but for their values."""
    source = random.Random(f"agent {seed} {round_number}")
    tools, records = list(TOOLS.items()), list(RECORDS.items())
    questions = []
    for number in range(count):
        kind, of = number % 2, number // 2
        questions.append(_record(source, *records[of % 2]) if kind else _call(source, *tools[of % 3]))
    return questions


def _call(source: random.Random, name: str, parameters: dict[str, Draw]) -> Question:
    given = " and ".join(f"{key} {value}" for key, value in _drawn(source, parameters).items())
    tools = [_tool(name, parameters) for name, parameters in TOOLS.items()]
    return Question(prompt_of([f"Call {name} with {given}."], tools))


def _record(source: random.Random, sentence: str, fields: dict[str, Draw]) -> Question:
    schema = _schema(_drawn(source, fields))
    request = f"Extract: {sentence.format_map(_drawn(source, fields))}\nSchema: {json.dumps(schema)}"
    return Question(prompt_of([request]))


def _drawn(source: random.Random, fields: dict[str, Draw]) -> Values:
    return {name: draw(source) for name, draw in fields.items()}


def _tool(name: str, parameters: dict[str, Draw]) -> dict[str, object]:
    schema = _schema(_drawn(random.Random(0), parameters))
    described = {"name": name, "description": f"Does {name.replace('_', ' ')}", "parameters": schema}
    return {"type": "function", "function": described}


def _schema(values: Values) -> dict[str, object]:
    properties = {name: {"type": _TYPES[type(value)]} for name, value in values.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}
