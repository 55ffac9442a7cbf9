"""What may be read of a model's folder: regular files that lie in it.

A folder from a stranger may hold links that lead elsewhere on this machine, or a pipe in a file's place: both are
refused before anything is opened. The hub's own cache is made of links: those to its `blobs` are followed.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from troupellm.models.read_errors import plain_name, why
from troupellm.protocol.errors import ModelLoadError

_READ = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt", ".safetensors", ".gguf"})
_FOLDERS = ("additional_chat_templates", "_Pooling")
"""How the names of folders end from which files are read, too."""


def check_folder(folder: Path) -> None:
    """
    Raises:
        ModelLoadError: a file that could be read is a link out of the folder, a pipe or a device.
    """
    home = Path(os.path.realpath(folder))
    try:
        for path in _files(folder):
            _check(path, home)
    except OSError as error:
        raise ModelLoadError(f"the folder {plain_name(folder.name)} cannot be listed: {why(error)}") from error


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in _READ:
            yield path
        elif path.name.endswith(_FOLDERS) and path.is_dir():
            yield from (inner for inner in sorted(path.iterdir()) if inner.suffix.lower() in _READ)


def _check(path: Path, home: Path) -> None:
    target = Path(os.path.realpath(path))
    if not (target.is_relative_to(home) or _is_blob(target, home)):
        raise ModelLoadError(
            f"{plain_name(path.name)} is a link out of the model's folder",
            hint="copy the file into the folder, or name the folder that has it",
        )
    try:
        mode = target.stat().st_mode
    except OSError:  # whoever reads it says what is wrong
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ModelLoadError(f"{plain_name(path.name)} is no regular file", hint="put the file itself in its place")


def _is_blob(target: Path, home: Path) -> bool:
    """Among the files of the hub's cache, to which its snapshots and older local copies link."""
    owner = target.parent.parent
    return target.parent.name == "blobs" and (home.parent == owner / "snapshots" or owner.name.startswith("models--"))
