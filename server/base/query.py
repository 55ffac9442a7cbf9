"""The query string, decoded into one typed Struct."""

from typing import Any, TypeVar, get_origin
from urllib.parse import parse_qsl

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.json_body import invalid_field

MAX_FIELDS = 64

StructT = TypeVar("StructT", bound=msgspec.Struct)


def decode_query(raw: bytes, kind: type[StructT]) -> StructT:
    """Decode into `kind`, whose list fields may be given more than once, also as `name[]`.

    Unknown names are ignored, unless `kind` forbids unknown fields.

    Raises:
        InvalidRequest: no query string, a single value given twice, a forbidden name, or not what the route takes.
    """
    try:
        pairs = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS, separator="&"
        )
    except ValueError:  # which UnicodeDecodeError is as well
        raise InvalidRequest("the query string is not valid, or has too many fields", code="invalid_query") from None
    fields = {field.encode_name: _is_list(field.type) for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in pairs:
        plain = name.removesuffix("[]")
        if kind.__struct_config__.forbid_unknown_fields and name not in fields and not fields.get(plain):
            text = f"the query has {name[:64]}, which this route does not take"
            raise InvalidRequest(text, param=name[:64], code="unsupported_parameter")
        if fields.get(plain):
            values.setdefault(plain, []).append(value)
        elif name in values:
            raise InvalidRequest(f"the query has {name[:64]} twice", param=name[:64], code="invalid_query")
        else:
            values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind, "the query") from None


def _is_list(kind: Any) -> bool:
    options = getattr(kind, "__args__", ())
    return get_origin(kind) in (list, tuple) or any(get_origin(option) in (list, tuple) for option in options)
