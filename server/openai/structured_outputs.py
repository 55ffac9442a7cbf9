"""From what a request says about its output's form to a guide: OpenAI's `response_format`, vLLM's `structured_outputs`,
its old `guided_*` names, and SGLang's `json_schema`, `regex` and `ebnf`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from troupellm.protocol.api.chat import GenerationFields
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.guide import GuideSpec, backend_of
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams, json_text

_OLD_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""vLLM's old names and SGLang's."""
FORM_FIELDS = ("response_format", "structured_outputs", "guided_whitespace_pattern", *_OLD_NAMES)
"""Fields of a request that ask for a form of the output."""


def guide_of(request: GenerationFields) -> GuideSpec | None:
    """The guide that a request asks for, if any.

    Raises:
        InvalidRequest: names the field; several fields that ask for different things are refused together.
    """
    asked = _response_format(request), _structured_outputs(request), _old(request)
    found = [guide for guide in asked if guide is not None]
    if len(found) > 1:
        fields = " and ".join(guide.field for guide in found)
        raise InvalidRequest(f"{fields} exclude each other", param=found[1].field)
    return found[0] if found else None


def _response_format(request: GenerationFields) -> GuideSpec | None:
    wanted, field = request.response_format, "response_format"
    if wanted is None:
        return None
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            return GuideSpec(kind="json_object", field=field, backend=_backend(request))
        case "json_schema":
            source = _openai_schema(wanted.get("json_schema"), f"{field}.json_schema")
            return GuideSpec(kind="json_schema", source=source, field=f"{field}.json_schema", backend=_backend(request))
        case "structural_tag":
            source = json_text(dict(wanted), field)
            return GuideSpec(kind="structural_tag", source=source, field=field, backend=_backend(request))
        case _:
            kinds = "text, json_object, json_schema, structural_tag"
            raise InvalidRequest(f"{field}.type must be one of {kinds}", param=f"{field}.type")


def _openai_schema(wrapper: Any, field: str) -> str:
    """`{"name", "schema", "strict"}`; the schema holds whether strict or not."""
    if not isinstance(wrapper, Mapping):
        raise InvalidRequest(f"{field} must be an object with a schema", param=field, code="invalid_type")
    if not isinstance(wrapper.get("strict"), bool | None):
        raise InvalidRequest(f"{field}.strict must be true or false", param=f"{field}.strict", code="invalid_type")
    if not isinstance(wrapper.get("name", ""), str):
        raise InvalidRequest(f"{field}.name must be text", param=f"{field}.name", code="invalid_type")
    if "schema" not in wrapper:
        raise InvalidRequest(f"{field}.schema is missing", param=f"{field}.schema", code="invalid_schema")
    schema = wrapper["schema"]
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{field}.schema must be an object", param=f"{field}.schema", code="invalid_type")
    return json_text(schema, f"{field}.schema")


def _structured_outputs(request: GenerationFields) -> GuideSpec | None:
    params, field = request.structured_outputs, "structured_outputs"
    if params is None:
        return None
    if params.backend is None and request.guided_decoding_backend is not None:
        params = msgspec.structs.replace(params, backend=_backend(request))
    return params.spec(field)


def _old(request: GenerationFields) -> GuideSpec | None:
    given = {name: getattr(request, name) for name in _OLD_NAMES if getattr(request, name) not in (None, False)}
    if not given:
        if request.guided_whitespace_pattern is not None:
            raise InvalidRequest(
                "guided_whitespace_pattern is only supported beside guided_json",
                param="guided_whitespace_pattern",
                code="unsupported_parameter",
            )
        return None
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} exclude each other", param=next(iter(given)))
    ((old, value),) = given.items()
    params = StructuredOutputsParams(
        backend=_backend(request), whitespace_pattern=request.guided_whitespace_pattern, **{_OLD_NAMES[old]: value}
    )
    return params.spec(old, alone=True)


def _backend(request: GenerationFields) -> str:
    """vLLM's `guided_decoding_backend`, with its options behind a colon."""
    name = request.guided_decoding_backend
    if name is None:
        return ""
    return backend_of(name.partition(":")[0], "guided_decoding_backend")
