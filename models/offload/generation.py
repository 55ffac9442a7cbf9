"""Which blocks of a model in a folder count: those that were named since they were last reset.

A small file beside the blocks holds a random value, drawn at each reset, that is part of every block's name. So whoever
reads the folder from then on, in this life of an engine or a later one, here or on another machine, looks for nothing
that was kept before; and what is being written while the blocks are reset gets a name that nobody asks for. No file is
the generation before the first reset.

A folder that cannot be written to keeps its generation, and there is no other place that every later life would look
at: a reset that it never took is lost with the engine that owes it.
"""

import contextlib
import errno
import os
import secrets
import stat

from troupellm.models.offload.store import StoreError

NAME = "troupellm-kv.generation"
"""A name of ours: a reset replaces whatever has it, in a folder where others may keep files too."""
UNFINISHED = r"\.troupellm-[0-9a-f]{16}"
"""Files that a process left behind which died while it made one."""
_BYTES = 16
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No links are followed, no pipe is waited for."""


def read_generation(folder: int, name: str = NAME) -> bytes:
    """Of an open folder; empty before its first reset.

    Args:
        name: of the file, where a folder has several generations.

    Raises:
        OSError, StoreError: it cannot be read; nobody knows then what counts.
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
