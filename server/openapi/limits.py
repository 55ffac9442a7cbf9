"""Ranges of request fields, as the schema of a field says them: from the tables that requests are checked against."""

from typing import Any

from troupellm.protocol.params import checks, sampling
from troupellm.protocol.params.pooling import POOLING_TASKS
from troupellm.server.openai.parameters import MAX_DOCUMENTS

_TOKEN_ID = {"minimum": 0, "maximum": 2**31 - 1}
_MOST_LOGPROBS = sampling.Limits(vocab_width=1, max_model_len=1).max_logprobs
_STOP = {"minLength": 1, "maxLength": sampling.MAX_STOP_LENGTH}

_FIELDS: dict[str, dict[str, dict[str, Any]]] = {
    # field: type of the branch that is meant: keywords
    "dimensions": {"integer": {"minimum": 1, "maximum": 2**31 - 1}},
    "top_n": {"integer": {"minimum": 0}},
    "encoding_format": {"string": {"enum": ["float", "base64"]}},
    "embed_dtype": {"string": {"enum": ["float32"]}},
    "task": {"string": {"enum": list(POOLING_TASKS)}},
    "top_logprobs": {"integer": {"minimum": 0, "maximum": _MOST_LOGPROBS}},
    "stop": {"string": _STOP, "array": {"maxItems": sampling.MAX_STOP_STRINGS, "items": {"type": "string"} | _STOP}},
    "bad_words": {"array": {"maxItems": sampling.MAX_BAD_WORDS, "items": {"type": "string"} | _STOP}},
    "stop_token_ids": {"array": {"maxItems": checks.MAX_ID_LIST, "items": {"type": "integer"} | _TOKEN_ID}},
    "allowed_token_ids": {
        "array": {"minItems": 1, "maxItems": checks.MAX_ID_LIST, "items": {"type": "integer"} | _TOKEN_ID}
    },
    "logprob_token_ids": {
        "array": {"minItems": 1, "maxItems": sampling.MAX_LOGPROB_IDS, "items": {"type": "integer"} | _TOKEN_ID}
    },
    "thinking_token_budget": {"integer": {"minimum": -1, "maximum": 2**31 - 1}},
    "truncate_prompt_tokens": {"integer": {"minimum": -1, "maximum": 2**31 - 1}},
    "documents": {"array": {"maxItems": MAX_DOCUMENTS}},
    "logit_bias": {
        "object": {
            "maxProperties": sampling.MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    },
}


def _sampling_fields() -> dict[str, dict[str, dict[str, Any]]]:
    fields: dict[str, dict[str, dict[str, Any]]] = {}
    for name, (low, high, exclusive) in sampling.number_ranges().items():
        least = "exclusiveMinimum" if exclusive else "minimum"
        whole = float(low).is_integer() and float(high).is_integer() and abs(high) > 2**20
        fields[name] = {"integer" if whole else "number": {least: low, "maximum": high}}
    return fields


def limit(schema: dict[str, Any]) -> None:
    """Write the ranges into a request's schema, in place; what a field says itself stays."""
    table = _sampling_fields() | _FIELDS
    for name, property_schema in schema.get("properties", {}).items():
        for branch in property_schema.get("anyOf", [property_schema]):
            for kind in (branch.get("type"), "number" if branch.get("type") == "integer" else None):
                for keyword, value in table.get(name, {}).get(str(kind), {}).items():
                    if keyword in ("items", "additionalProperties") or keyword not in branch:
                        branch[keyword] = value


def default_of(name: str) -> Any:
    """The default of a sampling field without a value in the request or the model; None if it depends on the route."""
    return None if name == "max_tokens" else getattr(sampling.SamplingParams(), name, None)
