"""Folders of adapters below those that the settings name. No folder is ever listed."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from troupellm.protocol.config.lora import is_adapter_name
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import printable

CONFIG: Final = "adapter_config.json"
_PARAM: Final = "lora_path"


def find_below(roots: Sequence[str], name: str, *, links: bool) -> Path | None:
    """The folder of that name below the first root that has one with an adapter in it. Reads the disk.

    Args:
        links: as of `allowed_folder`.
    """
    if not is_adapter_name(name):
        return None
    found = (_below(root, name, links=links) for root in roots)
    return next((folder for folder in found if folder is not None and (folder / CONFIG).is_file()), None)


def allowed_folder(path: str, roots: Sequence[str], *, links: bool) -> Path:
    """The folder that a load call names, if it lies below one of the roots. Reads the disk.

    Args:
        path: absolute, or below one of the roots.
        links: allow links that lead out of the root, as `allow_model_links` does.

    Raises:
        InvalidRequest: it lies elsewhere, or is no folder.
    """
    if not roots:
        raise InvalidRequest(f"{_PARAM}: no folder may be read; start with --lora-dir", param=_PARAM)
    if not path or "\0" in path:
        raise InvalidRequest(f"{_PARAM} must name a folder", param=_PARAM)
    for root in roots:
        if (folder := _below(root, path, links=links)) is not None:
            return folder
    raise InvalidRequest(
        f"{_PARAM}: {printable(path)} is no folder below one of --lora-dir ({len(roots)} given)", param=_PARAM
    )


def _below(root: str, path: str, *, links: bool) -> Path | None:
    """The folder at a path, absolute or from the root on; None if it is no folder or lies elsewhere."""
    home = os.path.realpath(root)
    wanted = os.path.normpath(os.path.join(home, path))
    target = wanted if links else os.path.realpath(wanted)
    inside = Path(target).is_relative_to(home) and target != home
    return Path(target) if inside and os.path.isdir(target) else None
