"""Reading `quantization_config`: nothing in it is passed over that might change the arithmetic."""

from collections.abc import Collection, Sequence
from typing import Any

from troupellm.models.hf_config import ConfigReader

MOST_NAMES = 65_536


def only(reader: ConfigReader, known: Collection[str]) -> None:
    """
    Raises:
        ModelLoadError: there is a setting beside those that are known.
    """
    unknown = next((key for key, value in reader.values.items() if key not in known and _says_something(value)), None)
    if unknown is not None:
        raise reader.refuse(unknown, "is not supported")


def texts(reader: ConfigReader, key: str) -> tuple[str, ...]:
    """A list of texts; empty when it is missing or null.

    Raises:
        ModelLoadError: something else.
    """
    value = reader.values.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MOST_NAMES or not all(isinstance(item, str) for item in value):
        raise reader.refuse(key, f"must be a list of at most {MOST_NAMES} texts")
    return tuple(value)


def pair(reader: ConfigReader, key: str) -> tuple[int, int]:
    """Two whole numbers above zero.

    Raises:
        ModelLoadError: something else.
    """
    value = reader.values.get(key)
    if (
        not isinstance(value, Sequence)
        or len(value) != 2
        or not all(isinstance(item, int) and not isinstance(item, bool) and item > 0 for item in value)
    ):
        raise reader.refuse(key, "must be two integers of at least 1")
    return value[0], value[1]


def _says_something(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != {}
