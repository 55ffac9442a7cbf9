"""What may be read of a model's folder: regular files that lie in it.

A folder from a stranger may hold links that lead elsewhere on this machine, or a pipe in a file's place: whoever is
about to open a file has it checked before, so that links that nobody follows harm nobody. The hub's own cache is made
of links: those to its `blobs` are followed.
"""

import os
import re
import stat
from pathlib import Path, PosixPath

from troupellm.models.read_errors import plain_name
from troupellm.protocol.errors import ModelLoadError

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""What the hub's library calls a blob."""
_LIBRARY_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".spm", ".codes", ".tokenizer"})
_LIBRARY_NAMES = frozenset({"vocab.txt", "merges.txt", "dict.txt"})


class Followed(PosixPath):
    """A path that may lead out of its folder, and so may all that are made from it: somebody has vouched for it."""


def readable(found: Path, name: str | None, links: bool) -> Path:
    """What was found, as its readers get it.

    Args:
        found: a folder, or a GGUF file.
        name: by which it was found; one that is itself a file's vouches for that file, and None for what is built in.
        links: whether `allow_model_links` is set.
    """
    return Followed(found) if links or name is None or Path(name).expanduser().is_file() else found


def check_file(path: Path, folder: Path | None = None) -> None:
    """To be called before a file is opened, or is looked for. One that is not there is left to who opens it.

    Args:
        folder: in which it must lie; if not given, the one that it is in by its name.

    Raises:
        ModelLoadError: it is a link out of the folder, a pipe or a device.
    """
    folder = path.parent if folder is None else folder
    try:
        home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    except ValueError:  # no file can have such a name
        return
    name = f"{plain_name(str(path.relative_to(folder)))} in the folder {plain_name(home.name or '/')}"
    if not (isinstance(path, Followed) or target.is_relative_to(home) or _is_blob(target, home)):
        raise ModelLoadError(
            f"{name} is a link out of it",
            hint="copy the file into the folder, or have all links followed with --allow-model-links",
        )
    try:
        mode = target.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ModelLoadError(f"{name} is no regular file", hint="put the file itself in its place")


def check_for_tokenizers(folder: Path) -> None:
    """The same of all files that `transformers` may open by itself to make a tokenizer of them.

    Raises:
        ModelLoadError: as above.
        OSError: the folder cannot be listed.
    """
    for path in sorted((*folder.iterdir(), *(folder / "additional_chat_templates").glob("*"))):
        if path.suffix in _LIBRARY_SUFFIXES or path.name in _LIBRARY_NAMES:
            check_file(path, folder)


def _is_blob(target: Path, home: Path) -> bool:
    """Among the files of the hub's cache, to which its snapshots and older local copies link."""
    owner, snapshots = target.parent.parent, home.parent
    if target.parent.name == "blobs" and (snapshots == owner / "snapshots" or owner.name.startswith("models--")):
        return True
    # Somebody may have moved all blobs to another disk. A link to just any folder does not make blobs of what is there.
    moved = snapshots.name == "snapshots" and str(target.parent) == os.path.realpath(snapshots.parent / "blobs")
    return moved and _DIGEST.fullmatch(target.name) is not None
