"""The header of a safetensors file, checked before the library opens the file.

The library names no sizes when a file is cut, and does not see that a name stands twice. Readers differ in which of two
equal names they take, so such a file could be one model where it is examined and another one where it is served.
"""

import json
import struct
from pathlib import Path
from typing import Any

from troupellm.models.hub.errors import plain_name, why
from troupellm.models.hub.json_file import LFS_POINTER, lfs_pointer
from troupellm.protocol.errors import ModelLoadError

MOST_BYTES = 100_000_000
"""Largest header; the library has the same limit."""
_LENGTH_BYTES = 8
_AGAIN = "download the file again"


def check_header(path: Path) -> object:
    """Look at a file's header and size.

    Returns:
        the header's value: an object with an entry for each tensor, where the library accepts it.

    Raises:
        ModelLoadError: the file cannot be read, is cut or too long, or a Git LFS pointer; or its header names a tensor,
            or a field of one, twice.
    """
    name = plain_name(path.name)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(len(LFS_POINTER))
            if begin == LFS_POINTER:
                raise lfs_pointer(name)
            length = _header_length(name, begin, size)
            file.seek(_LENGTH_BYTES)
            header = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{name} cannot be read: {why(error)}") from error
    try:
        tensors: object = json.loads(header, object_pairs_hook=_once)
    except _TwiceError as error:
        raise ModelLoadError(f"{name}: the header names {plain_name(error.name)} twice") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name} cannot be read: {why(error)}", hint=_AGAIN) from error
    described = _LENGTH_BYTES + length + _end_of_data(tensors)
    if size < described:
        raise ModelLoadError(f"{name} is cut: it has {size:,} of {described:,} bytes", hint=_AGAIN)
    if size > described:
        raise ModelLoadError(
            f"{name} is damaged: it has {size:,} bytes, its header describes {described:,}", hint=_AGAIN
        )
    return tensors


def _header_length(name: str, begin: bytes, size: int) -> int:
    """The header's bytes, from the first bytes of the file."""
    if len(begin) < _LENGTH_BYTES:
        raise ModelLoadError(f"{name} cannot be read: it has {size} bytes, which is no safetensors file", hint=_AGAIN)
    (length,) = struct.unpack("<Q", begin[:_LENGTH_BYTES])
    if length > MOST_BYTES:
        raise ModelLoadError(f"{name} cannot be read: it does not begin like a safetensors file", hint=_AGAIN)
    if _LENGTH_BYTES + length > size:
        least = _LENGTH_BYTES + length
        raise ModelLoadError(f"{name} is cut: it has {size:,} bytes, its header alone {least:,}", hint=_AGAIN)
    return int(length)


def _end_of_data(tensors: object) -> int:
    """Bytes of all tensors; the library refuses entries without such offsets."""
    entries = tensors.values() if isinstance(tensors, dict) else ()
    offsets = [entry["data_offsets"] for entry in entries if isinstance(entry, dict) and "data_offsets" in entry]
    ends = [pair[1] for pair in offsets if isinstance(pair, list) and len(pair) == 2 and type(pair[1]) is int]
    return max(ends, default=0)


class _TwiceError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _TwiceError(name)
        found[name] = value
    return found
