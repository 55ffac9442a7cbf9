"""Errors about a model that cannot be read: one line that names the file, without folders of this machine."""

import os
from pathlib import Path

from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.params.checks import printable

_WITHOUT_NUMBER: dict[type[OSError], str] = {
    FileNotFoundError: "No such file or directory",
    PermissionError: "Permission denied",
}
"""Libraries raise these with a text of their own, which has the whole path in it."""
_LONGEST_NAME = 128


def plain_name(name: str) -> str:
    """The name of a file or a tensor, which may hold any characters, made safe for one line of an error."""
    return printable(name, _LONGEST_NAME)


def why(error: Exception) -> str:
    """The reason alone, without the file."""
    if isinstance(error, OSError):
        return error.strerror or _WITHOUT_NUMBER.get(type(error), "it cannot be read")
    return str(error) or type(error).__name__


def load_failure(error: Exception) -> ModelLoadError:
    """The error for an unforeseen exception while a model is loaded."""
    name = error.filename if isinstance(error, OSError) else None
    if isinstance(name, str | bytes | os.PathLike):
        return ModelLoadError(f"{plain_name(Path(os.fsdecode(name)).name)}: {why(error)}")
    return ModelLoadError(f"the model could not be loaded: {str(error) or type(error).__name__}")
