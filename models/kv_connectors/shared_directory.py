"""Blocks as files in a folder that several engines mount.

Files appear whole: they are written beside their place and renamed. There are no locks. An engine that finds the folder
too full removes the least recently used files, and others may do so at the same time. A file that has gone is a miss to
its reader and no error to another engine that wanted to remove it. A file that is damaged, incomplete, or not a block
is a miss too; it is removed, so that the block can be written again. Files with other names are left alone and not
counted. A reset by one engine holds for all that serve the same model: it gives their folder a new generation number,
which every engine reads before every use. Writers measure the folder's size, a little with each block, for any number
of files.
"""

import contextlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from time import monotonic, time

import msgspec

from troupellm.models.kv_connectors.base import ConnectorContext
from troupellm.models.kv_connectors.folder_scan import File, FolderScan
from troupellm.models.kv_connectors.sealed_block import HEADER_BYTES, BlockSignature
from troupellm.models.kv_offload.disk_store_epoch import UNFINISHED, new_generation, read_generation
from troupellm.models.kv_offload.store import BlockStore, StoreCorrupt, StoreError, StoreMiss, StoreUse

NAME = "shared-directory"
DEFAULT_BYTES = 16 * 2**30
SUFFIX = ".kv"
_MODEL, _BYTE = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{2}")
_BLOCK, _ABANDONED = re.compile("[0-9a-f]+" + re.escape(SUFFIX)), re.compile(UNFINISHED)
"""Names that the connector uses: folders of models, folders of keys, blocks, and blocks that are being written."""
ABANDONED_SECONDS = 3600.0
"""A file that has not been renamed after this time belongs to a process that died."""
USED_SECONDS = 60.0
"""Precision of a file's last-use time: a read updates it at most this often."""
_LOOKS = 16
"""A writer looks at the folder's size again after a sixteenth of its limit."""
_RESET_SHARE = 0.4
"""Share of an operation's deadline for which a reset removes files."""
_LOOK_SHARE = 0.05
"""Share of that deadline for which a writer measures the folder before it goes on with its next block."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of a shared directory."""

    path: str
    """The folder; made if it is missing. A process that can write to it can only cause misses."""
    bytes: int | str = DEFAULT_BYTES
    """Most of the folder, of all models together; the engines that share it should agree. It may be exceeded by a
    sixteenth per engine that writes, and what is written while one looks at very many files."""


def open_shared_directory(context: ConnectorContext) -> "SharedDirectory":
    """
    Raises:
        ConfigError: an option is wrong.
    """
    options = context.options(Options)
    if not options.path:
        raise context.refuse("path", "must name a folder")
    limit = context.size("bytes", options.bytes)
    return SharedDirectory(Path(options.path).expanduser(), context.signature, limit, context.store.timeout)


class SharedDirectory(BlockStore):
    """Files lie under the first half of the model's fingerprint and the first byte of their key."""

    name = NAME

    def __init__(self, folder: Path, signature: BlockSignature, limit: int, timeout: float = 5.0) -> None:
        """limit: bytes of the whole folder; timeout: seconds that an operation may take."""
        self._root, self._signature, self._limit = folder, signature, limit
        self._reset_seconds, self._look_seconds = _RESET_SHARE * timeout, _LOOK_SHARE * timeout
        self._folder = folder / signature.fingerprint[:16].hex()
        self._lock = threading.Lock()
        self._looking = False
        self._scan: FolderScan | None = None
        """The scan under way, if any."""
        self._unseen = limit
        """Bytes that were written since the folder was looked at: at first as if it were full."""
        self._use = StoreUse(capacity_bytes=limit)
        self._evicted = 0

    def probe(self) -> None:
        """Check that files can be made there."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / _temporary()
        path.write_bytes(b"probe")
        path.unlink()

    def contains(self, keys: Sequence[bytes]) -> int:
        generation = self._generation()
        for count, key in enumerate(keys):
            try:
                found = self._path(key, generation).stat()
            except FileNotFoundError:
                return count
            if found.st_size != self._signature.frame_bytes:
                return count
        return len(keys)

    def put(self, key: bytes, data: memoryview) -> None:
        path = self._path(key, self._generation())  # before the bytes: a reset meanwhile holds for them too
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == self._signature.frame_bytes:
                return
        header, temporary = self._signature.header(key, data), path.parent / _temporary()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(temporary, "xb", buffering=0) as file:
                for part in (memoryview(header), data):
                    _write_all(file.fileno(), part)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._wrote(self._signature.frame_bytes)

    def get(self, key: bytes, into: memoryview) -> None:
        path = self._path(key, self._generation())
        try:
            # A link or a pipe in a block's place is not followed, nor waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise StoreMiss(key.hex()) from None
        except OSError as error:
            if path.is_symlink():
                raise self._refused(path, "a link") from error
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self._signature.frame_bytes:
                raise self._refused(path, "no block")
            header = bytearray(HEADER_BYTES)
            if not _read_all(descriptor, memoryview(header)) or not _read_all(descriptor, into):
                raise self._refused(path, "short")
            try:
                self._signature.check(key, header, into)
            except StoreCorrupt as error:
                raise self._refused(path, str(error)) from None
        finally:
            os.close(descriptor)
        if time() - found.st_mtime > USED_SECONDS:
            with contextlib.suppress(OSError):  # it has another owner, or is gone; the block was read all the same
                os.utime(path)

    def reset(self) -> None:
        """As `BlockStore`; files that are not removed in time are the first to give way."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = _open_folder(self._folder)
        try:
            now, deadline = time(), monotonic() + self._reset_seconds
            new_generation(folder)
        finally:
            os.close(folder)
        for file in self._files_of(self._folder, now):
            if monotonic() > deadline:
                return
            if file.used <= now:  # others write blocks of the new generation already
                with contextlib.suppress(OSError):  # it has gone, or is not for this user to remove
                    os.unlink(file.path)

    def use(self) -> StoreUse:
        return self._use

    def close(self) -> None:
        """The files stay."""

    def _generation(self) -> bytes:
        try:
            folder = _open_folder(self._folder)
        except FileNotFoundError:
            return b""
        try:
            return read_generation(folder)
        finally:
            os.close(folder)

    def _path(self, key: bytes, generation: bytes) -> Path:
        name = sha256(generation + key).hexdigest() if generation else key.hex()
        return self._folder / name[:2] / (name + SUFFIX)

    def _refused(self, path: Path, why: str) -> StoreCorrupt:
        with contextlib.suppress(OSError):
            path.unlink()
        return StoreCorrupt(why)

    def _wrote(self, size: int) -> None:
        """Look at the folder when enough was written; one thread does so at a time."""
        with self._lock:
            self._unseen += size
            is_due = self._scan is not None or self._unseen >= max(size, self._limit // _LOOKS)
            if self._looking or not is_due:
                return
            self._looking = True
            if self._scan is None:
                self._unseen = 0
        try:
            self._look()
        finally:
            with self._lock:
                self._looking = False

    def _look(self) -> None:
        scan = self._scan or FolderScan(self._files(), self._limit)
        self._scan = None  # it is over if it fails
        if not scan.go_on(monotonic() + self._look_seconds):
            self._scan = scan
            return
        self._evicted += scan.evicted
        self._use = StoreUse(scan.count, scan.total, self._limit, self._evicted)
        if scan.too_much:
            self._unseen = self._limit

    def _files(self) -> Iterator[File]:
        """Scan the blocks of all models; abandoned files that were never finished are removed."""
        now = time()
        for model in _names(self._root, _MODEL):
            for path in _names(model, _ABANDONED):  # of a probe
                _remove_old(path, now)
            yield from self._files_of(model, now)

    def _files_of(self, model: str | Path, now: float) -> Iterator[File]:
        for folder in _names(model, _BYTE):
            for path in _names(folder, _ABANDONED):
                _remove_old(path, now)
            for path in _names(folder, _BLOCK):
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(path)
                    if stat.S_ISREG(found.st_mode):
                        yield File(found.st_mtime, found.st_size, path)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _names(folder: str | Path, wanted: re.Pattern[str]) -> Iterator[str]:
    """Paths of what is so named in a folder, which may be none, have gone, or be another user's alone; links
    to folders are not followed."""
    if os.path.islink(folder) and wanted is not _MODEL:
        return
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for name in names:
        if wanted.fullmatch(name):
            yield os.path.join(folder, name)


def _remove_old(path: str, now: float) -> None:
    with contextlib.suppress(OSError):  # gone, another user's, or no file: not an error of the folder
        if now - os.lstat(path).st_mtime > ABANDONED_SECONDS:
            os.unlink(path)


def _temporary() -> str:
    return f".troupellm-{secrets.token_hex(8)}"


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        written = os.write(descriptor, data)
        if not written:
            raise StoreError("nothing can be written")
        data = data[written:]


def _read_all(descriptor: int, into: memoryview) -> bool:
    """False: the file ended before."""
    while into:
        count = os.readv(descriptor, [into])
        if not count:
            return False
        into = into[count:]
    return True
