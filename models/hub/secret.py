"""The secret behind the keys of KV blocks, in a file, so that keys survive a restart and agree between engines.

A process that knows the secret can name, read and forge the blocks of all engines that share it. So only the file's
owner may write it, and only the owner and the group may read it. Blocks that are stored or sent are authenticated by
keys derived from it.
"""

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError

SECRET_BYTES = 32
BESIDE_BLOCKS = "prefix-hash-secret"
"""Name of the file in the folder of a disk tier, where no other was given."""
_FIELD = "prefix_hash_secret_file"
_LARGEST_FILE = 4096


def secret_file(config: EngineConfig) -> Path | None:
    """The file of an engine's secret; None if no block outlives the engine, whose secret is drawn at its start."""
    given, disk = config.cache.prefix_hash_secret_file, config.offload.kv_offload_disk_path
    if given is not None:
        return Path(given).expanduser()
    return None if disk is None else Path(disk).expanduser() / BESIDE_BLOCKS


def read_secret(path: Path) -> bytes:
    """The secret of a file, which is made with a fresh one if it is not there; engines may do so at the same time.

    Raises:
        ConfigError: the file cannot be read or made, others may write or read it, or it holds something else.
    """
    try:
        if not path.exists():
            _create(path)
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_LARGEST_FILE)
    except OSError as error:
        raise ConfigError(f"{_FIELD} cannot be read or made: {error.strerror}", param=_FIELD) from error
    if found.st_uid not in (os.geteuid(), 0):  # the owner could forge blocks
        raise ConfigError(f"{_FIELD}: it belongs to another user; chown it to the engine's", param=_FIELD)
    if stat.S_IMODE(found.st_mode) & 0o027:
        raise ConfigError(f"{_FIELD} must not be writable for its group or open to others: chmod 600", param=_FIELD)
    try:
        secret = bytes.fromhex(content.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{_FIELD} must hold {2 * SECRET_BYTES} hexadecimal digits and nothing else", param=_FIELD)
    return secret


def derived_key(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose, which reveals nothing about the secret or other purposes' keys; 32 bytes."""
    return hmac.digest(secret, purpose.encode(), "sha256")


def prefix_hash_key(secret: bytes, fingerprint: str) -> bytes:
    """The key of the prefix hash: models or settings that differ have no block key in common.

    Args:
        fingerprint: `WorkerReady.fingerprint`.
    """
    return derived_key(secret, f"prefix hash of {fingerprint}")


def _create(path: Path) -> None:
    """Create the file whole or not at all; of two processes, the second one finds the first one's file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
