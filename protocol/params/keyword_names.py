"""Structs that also take vLLM's keywords for their fields."""

from typing import TYPE_CHECKING, Any

import msgspec

StructMeta = type(msgspec.Struct)


class OtherKeywords(StructMeta):  # type: ignore[misc,valid-type]
    """Metaclass of a Struct with `other_keywords`, a table from the other spelling to the field."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            for other, field in cls.other_keywords.items():
                if other in fields:
                    fields[field] = fields.pop(other)
            return super().__call__(*args, **fields)
