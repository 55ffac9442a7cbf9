"""The types of parameters are found with bounded work, and unwrapped arguments are JSON that can be encoded."""

import json
from typing import Any

import msgspec
import pytest

from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.values import MOST_SCHEMA_STEPS


class Counted(dict[str, Any]):
    """A document that counts how often it is read."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += 1
        return super().get(key, default)


def offered_tools(schema: dict[str, Any]) -> OfferedTools:
    return OfferedTools([{"name": "f", "parameters": schema}])


def branching(levels: int, end: dict[str, Any]) -> dict[str, Any]:
    """Each level has eight references to the next one."""
    levels_by_name: dict[str, Any] = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 8} for level in range(levels)
    }
    return levels_by_name | {f"d{levels}": end}


def test_a_schema_with_many_branches_is_read_up_to_a_number_of_steps() -> None:
    schema = Counted(properties={"k": {"$ref": "#/$defs/d0"}})
    schema["$defs"] = Counted(branching(6, {"type": "integer"}))
    assert offered_tools(schema).types("f", "k") == frozenset()
    assert schema["$defs"].reads <= MOST_SCHEMA_STEPS


def test_branches_beyond_the_eighth_count() -> None:
    branches = [{"type": "integer"}] * 12 + [{"type": "string"}]
    assert offered_tools({"properties": {"k": {"anyOf": branches}}}).types("f", "k") == {"integer", "string"}


def test_the_types_of_a_parameter_are_found_once() -> None:
    schema = Counted(properties={"k": {"$ref": "#/$defs/d0"}})
    schema["$defs"] = {"d0": {"type": "integer"}}
    tool = offered_tools(schema)
    assert tool.types("f", "k") == {"integer"}
    before = schema.reads
    assert tool.types("f", "k") == {"integer"}
    assert schema.reads == before


@pytest.mark.parametrize("reference", ["#/" + "/".join("a" * 33), "#/" + "a" * 5000])
def test_a_long_reference_names_no_schema(reference: str) -> None:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(33):
        inner = {"a": inner}
    schema = inner | {"a" * 5000: {"type": "integer"}, "properties": {"k": {"$ref": reference}}}
    assert offered_tools(schema).types("f", "k") == frozenset()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"arguments": "{\\"a\\": \\"\\ud83d\\"}"}', {"a": "\ud83d"}),
        ('{"input": {"a": 1}, "input": {"a": 2}}', {"a": 2}),
        ('{"input": {"a": 1.50}}', {"a": 1.5}),
        ('{"input": {"a": 1}, "input": {"b": 2}}', {"input": {"b": 2}}),
    ],
)
def test_unwrapped_arguments_are_json_that_can_be_encoded(text: str, value: object) -> None:
    unwrapping = offered_tools({"properties": {"a": {}}}).wrapper("f")
    assert unwrapping is not None
    shown = unwrapping.add(text) + unwrapping.rest(whole=True)
    assert json.loads(shown) == value
    assert msgspec.json.decode(msgspec.json.encode(shown)) == shown
