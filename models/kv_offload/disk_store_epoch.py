"""Generations: a folder's blocks are valid if they were named since the last reset of their model.

A small file beside the blocks holds a random value, drawn at each reset, that is part of every block's name. Every
later reader of the folder, in the same engine, a restarted one, or on another machine, therefore finds no earlier
block. A block that is being written during the reset gets a name that is never looked up. Before the first reset there
is no file, which counts as a generation too.

A folder that cannot be written to keeps its generation. No other place is read by all later engines, so a reset that
the folder never took is lost when its engine ends.
"""

import contextlib
import errno
import os
import secrets
import stat

from troupellm.models.kv_offload.store import StoreError

NAME = "troupellm-kv.generation"
"""The file's reserved name: a reset replaces any file of that name, in a folder that may hold other files too."""
UNFINISHED = r"\.troupellm-[0-9a-f]{16}"
"""Files left behind by a process that died while it wrote one."""
_BYTES = 16
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Does not follow links or wait for pipes."""


def read_generation(folder: int, name: str = NAME) -> bytes:
    """Of an open folder; empty before its first reset.

    Args:
        name: of the file, where a folder has several generations.

    Raises:
        OSError, StoreError: it cannot be read, so the valid blocks are unknown.
    """
    try:
        file = os.open(name, os.O_RDONLY | _SAFE, dir_fd=folder)
    except FileNotFoundError:
        return b""
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != _BYTES:
            raise StoreError("the folder's generation is no file of ours")
        return os.read(file, _BYTES)
    finally:
        os.close(file)


def new_generation(folder: int, name: str = NAME) -> bytes:
    """Begin another one, which holds when this returns, also after a power failure.

    Raises:
        OSError: the folder cannot be written to; nothing has changed.
    """
    generation = secrets.token_bytes(_BYTES)
    temporary = f".troupellm-{secrets.token_hex(8)}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=folder)
    try:
        try:
            if os.write(file, generation) != _BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)
    return generation
