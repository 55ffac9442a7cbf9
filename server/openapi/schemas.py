"""The Structs of bodies and answers as JSON schemas."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

from troupellm.server.openapi.limits import default_of, limit

REF = "#/components/schemas/{name}"


class Schemas:
    """Schemas of all types that routes name, each under its own name where it is a Struct."""

    def __init__(self, requests: Iterable[Any], answers: Iterable[Any]) -> None:
        asked, given = list(requests), list(answers)
        asked_structs, given_structs = set(_structs(asked)), set(_structs(given))
        kinds = [*asked, *given, *sorted(asked_structs | given_structs, key=lambda kind: kind.__qualname__)]
        refs, components = msgspec.json.schema_components(kinds, ref_template=REF)
        self.components: dict[str, dict[str, Any]] = components
        self._refs = list(zip(kinds, refs, strict=True))
        for kind in asked_structs:
            self._finish_request(self._component(kind))
        for kind in given_structs - asked_structs:
            self._finish_answer(kind, self._component(kind))

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type that was named, mostly a reference."""
        found: dict[str, Any] = next(ref for known, ref in self._refs if known == kind)
        return found

    def _component(self, kind: Any) -> dict[str, Any]:
        name = self.of(kind).get("$ref", "").rpartition("/")[2]
        return self.components.get(name, {})

    @staticmethod
    def _finish_request(schema: dict[str, Any]) -> None:
        limit(schema)
        for name, field in schema.get("properties", {}).items():
            default = default_of(name)
            if field.get("default", ...) is None and default is not None and "description" not in field:
                shown = msgspec.json.encode(default).decode()
                field["description"] = f"Without it: what the model's generation_config.json says, else {shown}."

    @staticmethod
    def _finish_answer(kind: Any, schema: dict[str, Any]) -> None:
        """A field with a default is still always sent, unless the Struct leaves defaults out."""
        if kind.__struct_config__.omit_defaults or "properties" not in schema:
            return
        fields = [field for field in msgspec.structs.fields(kind) if field.default is not msgspec.UNSET]
        tag = kind.__struct_config__.tag_field
        schema["required"] = [*([tag] if tag else []), *(field.encode_name for field in fields)]


def _structs(kinds: Iterable[Any]) -> Iterator[Any]:
    """Every Struct inside the types."""
    pending: list[Any] = [inspect.type_info(kind) for kind in kinds]
    seen: set[Any] = set()
    while pending:
        info = pending.pop()
        if isinstance(info, inspect.StructType):
            if info.cls in seen:
                continue
            seen.add(info.cls)
            yield info.cls
        for name in getattr(info, "__struct_fields__", ()):
            value = getattr(info, name)
            pending.extend(value if isinstance(value, tuple) else [value])


def parameters(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """The parameters of the query string."""
    (_,), components = msgspec.json.schema_components([kind], ref_template=REF)
    schema = components[kind.__name__]
    return [
        {
            "name": name,
            "in": "query",
            "required": name in schema.get("required", ()),
            "schema": _inlined(field, components),
        }
        for name, field in schema["properties"].items()
    ]


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(components[schema["$ref"].rpartition("/")[2]], components)
        # A parameter that is not there is left out; the text "null" is no null.
        kept = {name: _inlined(value, components) for name, value in schema.items() if name != "default"}
        options = [option for option in kept.pop("anyOf", []) if option.get("type") != "null"]
        return kept | (options[0] if len(options) == 1 else {"anyOf": options} if options else {})
    return [_inlined(item, components) for item in schema] if isinstance(schema, list) else schema
