"""`StructuredOutputsParams`: vLLM's names for what a guide is made from, in Python and inside a request's body."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.guide import GuideKind, GuideSpec, backend_of

_ONE_OF: tuple[GuideKind | str, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OF_JSON = ("json_object", "json_schema", "structural_tag")
MAX_CHOICES = 10_000


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the output: exactly one of the first six fields is set."""

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as text or as an object."""
    regex: str | None = None
    """All of the output must match it."""
    choice: Sequence[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """Lark, or EBNF with ::= as llama.cpp and xgrammar write it."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    backend: str | None = None
    """guidance (llguidance) or xgrammar; None leaves it to the server. Ours."""
    disable_fallback: bool | None = None
    """Without effect: a backend that cannot do it is never replaced by another one that was not asked for."""

    def spec(self, field: str = "structured_outputs", *, after: str = "", alone: bool = False) -> GuideSpec:
        """The guide that this describes.

        Args:
            field: what errors call it.
            after: see `GuideSpec`.
            alone: the field holds one of the six and not this object.

        Raises:
            InvalidRequest: none or several of the six, or a value that cannot be one.
        """
        given = [name for name in _ONE_OF if getattr(self, name) not in (None, False) or self._denied(name)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise InvalidRequest(f"{field} must have exactly one of {', '.join(_ONE_OF)}; got {found}", param=field)
        place = field if alone else f"{field}.{given[0]}"
        kind, source = self._source(given[0], place)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InvalidRequest(
                f"{field} has whitespace_pattern and disable_any_whitespace, which exclude each other", param=field
            )
        if self.whitespace_pattern is not None and kind not in _OF_JSON:
            raise InvalidRequest(
                f"{field}: whitespace_pattern is only supported for JSON, not beside {given[0]}",
                param=field,
                code="unsupported_parameter",
            )
        return GuideSpec(
            kind=kind,
            source=source,
            backend=backend_of(self.backend or "", f"{field}.backend"),
            after=after,
            any_whitespace=not self.disable_any_whitespace,
            whitespace_pattern=self.whitespace_pattern or "",
            additional_properties=not self.disable_additional_properties,
            field=place,
        )

    def _denied(self, name: str) -> bool:
        """`json: false` is a schema, which nothing fits; `json_object: false` asks for nothing."""
        return name == "json" and self.json is False

    def _source(self, name: str, field: str) -> tuple[GuideKind, str]:
        value = getattr(self, name)
        match name:
            case "json":
                return "json_schema", json_text(value, field)
            case "regex":
                return "regex", _text(value, field)
            case "choice":
                return "choice", _choices(value, field)
            case "grammar":
                return "grammar", _text(value, field)
            case "json_object":
                if value is not True:
                    raise InvalidRequest(f"{field} must be true", param=field)
                return "json_object", ""
            case _:
                return "structural_tag", json_text(value, field)


def json_text(value: Any, field: str) -> str:
    """A JSON value as text; text is taken as it is.

    Raises:
        InvalidRequest: it is no JSON.
    """
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(f"{field} must be plain JSON", param=field, code="invalid_schema") from None


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be text", param=field, code="invalid_type")
    return value


def _choices(value: Any, field: str) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise InvalidRequest(f"{field} must be a list of texts, not empty", param=field)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{field} must have at most {MAX_CHOICES} entries", param=field)
    if not all(isinstance(choice, str) and choice for choice in value):
        raise InvalidRequest(f"{field} must hold texts, none of them empty", param=field)
    return json_text(list(value), field)
