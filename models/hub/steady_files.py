"""Detects that a file was replaced or truncated while a model is loaded from it.

A replaced file would leave a model made of parts of two. A truncated one would kill the whole process, since weights
are memory-mapped. So the files are also checked before every tensor.
"""

from collections.abc import Iterable
from pathlib import Path

from troupellm.protocol.errors import ModelLoadError


class SteadyFiles:
    """Compares files with their first state. A file that is missing at first is left to its reader to report."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._states = {file: state for file in files if (state := _state(file)) is not None}

    def check(self, *files: Path) -> None:
        """Look at all of them again, or at these.

        Raises:
            ModelLoadError: one has changed, or is gone.
        """
        for file in files or self._states:
            before, now = self._states.get(file), _state(file)
            if before is not None and now != before:
                raise ModelLoadError(
                    f"{file.name} {_change(before[0], now)} while the model was read from it",
                    hint="start again when the files are whole",
                )


def _change(size: int, now: tuple[int, int] | None) -> str:
    if now is None:
        return "has gone"
    return "has changed" if now[0] == size else f"has changed from {size:,} to {now[0]:,} bytes"


def _state(file: Path) -> tuple[int, int] | None:
    """Size and time of the last change. Not the inode: some network file systems make up another one every time."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
