"""Files that only their owner may read, and that are on the disk when that is said."""

import os
import secrets
from pathlib import Path
from typing import BinaryIO


def new_name() -> str:
    """For what is being written."""
    return secrets.token_hex(16)


def create_private(path: Path) -> BinaryIO:
    """A new file that only its owner may read, with any umask."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def sync(output: BinaryIO) -> None:
    """Its bytes are on the disk when this returns. Blocks."""
    output.flush()
    os.fsync(output.fileno())


def sync_folder(folder: Path) -> None:
    """A name that was given or taken is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
