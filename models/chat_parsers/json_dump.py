"""Values as JSON that can be encoded."""

import json
import re
from typing import Any, Final

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def json_dump(value: Any) -> str:
    """A value as JSON that can be encoded.

    Raises:
        ValueError: it holds a number that JSON cannot hold.
    """
    return without_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def without_surrogates(text: str) -> str:
    """JSON in which halves of surrogate pairs, which no encoding has, are escaped as the model wrote them."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
