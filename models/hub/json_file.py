"""The JSON files of a model, all read in one way.

A byte order mark, NaN and Infinity are accepted: editors and Python's own writer leave them in published files.
"""

import json
from pathlib import Path
from typing import Any

from troupellm.models.hub.errors import plain_name, why
from troupellm.protocol.errors import ModelLoadError

MOST_BYTES = 256 * 2**20
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the text that Git leaves in a file's place where Git LFS did not run."""


def read_value(path: Path) -> Any:
    """The value in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ModelLoadError: it is not JSON, too large, or a Git LFS pointer.
    """
    name = plain_name(path.name)
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ModelLoadError(f"{name} has {size:,} bytes; JSON files of at most {MOST_BYTES:,} are read")
        content = path.read_bytes()
        if content.startswith(LFS_POINTER):
            raise lfs_pointer(name)
        return json.loads(content)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8 is a ValueError
        raise ModelLoadError(f"{name} cannot be read: {why(error)}") from error


def read_object(path: Path) -> dict[str, Any]:
    """As `read_value`, for a file that must hold an object."""
    values = read_value(path)
    if not isinstance(values, dict):
        raise ModelLoadError(f"{plain_name(path.name)}: expected an object, got {type(values).__name__}")
    return values


def lfs_pointer(name: str) -> ModelLoadError:
    """The error for a file that Git LFS has not fetched."""
    return ModelLoadError(f"{name} is a Git LFS pointer, not the file itself", hint="run git lfs pull in the folder")
