"""What the safetensors library does not look at in a file's header: whether a name stands there twice.

Readers differ in which of the two they take, so that a file could be one model where it is examined, and another one
where it is served.
"""

import json
import struct
from pathlib import Path
from typing import Any

from troupellm.models.read_errors import plain_name, why
from troupellm.protocol.errors import ModelLoadError

MOST_BYTES = 100_000_000
"""Of a header; the library reads no more either."""


def check_names(path: Path) -> None:
    """Look at a file that the library could open.

    Raises:
        ModelLoadError: its header names a tensor, or a field of one, twice.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(length) if length <= MOST_BYTES else b""
    except (OSError, struct.error) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {why(error)}") from error
    try:
        json.loads(header, object_pairs_hook=_once)
    except _TwiceError as error:
        raise ModelLoadError(f"{path.name}: the header names {plain_name(error.name)} twice") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {why(error)}") from error


class _TwiceError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _once(pairs: list[tuple[str, Any]]) -> None:
    """Keeps nothing: a header may be large."""
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _TwiceError(name)
        names.add(name)
