"""Limits the files that are read of a model's folder to regular files inside it.

An untrusted folder may hold links that lead elsewhere on this machine, or a pipe in a file's place. A reader therefore
has each file checked right before it opens it; links that are never opened do no harm. The hub's own cache consists of
links: those to its `blobs` are followed.
"""

import os
import re
import stat
from pathlib import Path, PosixPath

import msgspec

from troupellm.models.hub.errors import plain_name
from troupellm.protocol.errors import ModelLoadError

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of blobs in the cache of the hub's library."""
_SHARED = ".huggingface-shared-blobs"
"""Folder of blobs that the repositories of a cache share, sorted by the first two digits of their names."""
_LIBRARY_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".spm", ".codes", ".tokenizer"})
_LIBRARY_NAMES = frozenset({"vocab.txt", "merges.txt", "dict.txt"})


class Followed(PosixPath):
    """A path that may lead out of its folder, as may all paths made from it: the settings or the user vouch for it."""


def readable(found: Path, name: str | None, links: bool) -> Path:
    """Mark a model's path as `Followed` if links out of it are allowed.

    Args:
        found: a folder, or a GGUF file.
        name: the user's name for the model; the name of a file vouches for that file. None is the built-in model.
        links: whether `allow_model_links` is set.
    """
    return Followed(found) if links or name is None or Path(name).expanduser().is_file() else found


def check_file(path: Path, folder: Path | None = None) -> None:
    """Check a file before it is opened, or looked for. A missing file is left to its reader to report.

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
    settings, special = (_strings(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    for name, key in (
        *(("tokenizer_config.json", key) for key in ("vocab", "merges") if isinstance(settings.get(key), str)),
        *(("special_tokens_map.json", key) for key in special if key.endswith("_file")),
    ):
        raise ModelLoadError(f"{name}: {plain_name(key)} names a file to read", hint="put the file into the folder")
    listed = settings.get("fast_tokenizer_files")
    if isinstance(listed, list) and any(not isinstance(entry, str) or "/" in entry for entry in listed):
        raise ModelLoadError("tokenizer_config.json: fast_tokenizer_files must be names of files in the folder")


def _strings(path: Path) -> dict[str, object]:
    """A file's settings; empty if it is no JSON object, which its actual reader reports."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (OSError, ValueError, RecursionError):
        return {}


def _is_blob(target: Path, home: Path) -> bool:
    """True if the target is in the hub's cache, to which its snapshots and older local copies link."""
    owner = target.parent.parent
    if target.parent.name == "blobs" and (owner / "snapshots" in home.parents or owner.name.startswith("models--")):
        return True
    if not _DIGEST.fullmatch(target.name):  # a blob must also have a blob's name
        return False
    if target.parent.name == target.name[:2] and (owner / _SHARED).is_file():
        return True
    # The user may have moved a repository's blobs to another disk.
    snapshots = next((folder for folder in home.parents if folder.name == "snapshots"), None)
    return snapshots is not None and str(target.parent) == os.path.realpath(snapshots.parent / "blobs")
