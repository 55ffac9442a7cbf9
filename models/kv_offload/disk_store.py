"""Blocks as files in a folder, which outlive the process.

There is one file per block, named by its key and the model's fingerprint; `framing` defines its content. Files that
this store did not make are not read, touched or counted. Its own files have mode 0600 and are opened without following
links; a file of another user is not read.

A file is written under a temporary name and renamed when it is whole. There is no fsync: a block that a power failure
damages fails its checksum and is computed again, so waiting for the medium would gain nothing. All renamed files
survive the end of the process (kill -9 included), since the system has their content.

A reset gives the model's blocks another generation, so that no earlier block is found again, and removes their files.
Files that it has no time to remove are the first to be evicted. Blocks of other models stay.

The folder belongs to one engine at a time: the one that holds the lock file. For another engine the tier is disabled
and tried again later, so a new instance takes over when the old one has ended. Only generations are changed without
the lock: a reset must not wait for it.
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from threading import Lock
from time import monotonic, sleep, time

from troupellm.models.kv_offload.block_format import HEADER_BYTES, Framing
from troupellm.models.kv_offload.disk_store_epoch import UNFINISHED, new_generation, read_generation
from troupellm.models.kv_offload.store import BlockStore, StoreContext, StoreCorrupt, StoreError, StoreMiss, StoreUse

LOCK_NAME = "troupellm-kv.lock"
LOCK_TRIES, LOCK_SECONDS = 20, 0.05
_BLOCK = re.compile(r"[0-9a-f]{2,128}\.[0-9a-f]{16}\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.kv-new|" + UNFINISHED)
_ALLOCATION = 4096
"""File systems hand out space in such pieces."""
MOST_BLOCKS = 1_000_000
"""Names in memory, some 200 bytes each."""
RESET_SHARE = 0.4
"""Share of an operation's deadline for which a reset removes files."""
USE_SECONDS = 60.0
"""A file whose time of use is older gets a new one when it is used: the order of eviction after a restart."""


class DiskStore(BlockStore):
    """Bounded: the block that was not used for longest gives way. Fit for several threads."""

    name = "disk"

    def __init__(self, folder: Path, context: StoreContext, capacity_bytes: int) -> None:
        """Nothing is touched before the first `probe`."""
        self._path, self._capacity = folder, capacity_bytes
        self._framing = Framing(context.fingerprint, context.block_bytes)
        self._fingerprint, self._reset_seconds = context.fingerprint, RESET_SHARE * context.timeout
        self._suffix = self._suffix_of(b"")
        self._generation = f"troupellm-kv-{context.fingerprint[:8].hex()}.generation"
        self._frame_space = _space(self._framing.frame_bytes)
        self._most = max(1, min(MOST_BLOCKS, capacity_bytes // self._frame_space))
        self._lock = Lock()
        self._index: OrderedDict[str, int] = OrderedDict()
        """Name to space on disk, the block that was used last at the end. Those of other models count and give way."""
        self._used = 0
        self._evicted = 0
        self._folder = self._locked = -1

    def contains(self, keys: Sequence[bytes]) -> int:
        """As `BlockStore`; from memory."""
        with self._lock:
            for count, key in enumerate(keys):
                if key.hex() + self._suffix not in self._index:
                    return count
        return len(keys)

    def put(self, key: bytes, data: memoryview) -> None:
        """As `BlockStore`.

        Raises:
            OSError: the file cannot be written; nothing of it stays.
        """
        name = key.hex() + self._suffix
        with self._lock:
            if name in self._index:
                self._index.move_to_end(name)
                return
        try:
            self._make_room(self._frame_space)
            self._write(name, self._framing.header(key, data), data)
        except BaseException:
            with self._lock:
                self._used -= self._frame_space
            raise
        with self._lock:
            if name in self._index:  # another thread was as fast
                self._used -= self._frame_space
            self._index[name] = self._frame_space
            self._index.move_to_end(name)

    def get(self, key: bytes, into: memoryview) -> None:
        """As `BlockStore`.

        Raises:
            OSError: the file is there, and cannot be read.
        """
        name = key.hex() + self._suffix
        with self._lock:
            if name not in self._index:
                raise StoreMiss
        header = bytearray(HEADER_BYTES)
        try:
            file = os.open(name, _READ, dir_fd=self._open_folder())
        except FileNotFoundError:
            self._drop(name)
            raise StoreMiss from None
        except OSError as error:
            if not self._is_ours(name):  # a link, say: this store has not written it
                self._drop(name)
                raise StoreMiss from None
            raise error
        try:
            found = os.fstat(file)
            if not _ours(found):
                self._drop(name)
                raise StoreMiss
            read = os.preadv(file, [header, into], 0)
            if read != self._framing.frame_bytes or found.st_size != read:
                raise StoreCorrupt("short")
            self._framing.check(key, header, into)
            if abs(time() - found.st_mtime) > USE_SECONDS:
                with contextlib.suppress(OSError):  # of a folder that is read-only now
                    os.utime(file)
        except StoreCorrupt:
            self._remove(name)
            raise
        except OSError:
            self._remove(name)  # the medium, perhaps; this one is not asked for again
            raise
        finally:
            os.close(file)
        with self._lock:
            if name in self._index:
                self._index.move_to_end(name)

    def probe(self) -> None:
        """Open the folder and list its blocks, if that was not done yet; write, read and remove a test block.

        Raises:
            StoreError: another engine has the folder.
            OSError: it cannot be written to or read.
        """
        if not self._is_open():
            self._open()
        name = _temporary_name()
        data = secrets.token_bytes(64).ljust(self._framing.frame_bytes, b"\0")
        try:  # exceeds the blocks' limit for a moment: no block is evicted for it
            self._write_new(name, (data,))
            file = os.open(name, _READ, dir_fd=self._folder)
            try:
                if os.pread(file, len(data), 0) != data:
                    raise StoreError("a written block is not read back unchanged")
            finally:
                os.close(file)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._open_folder())

    def reset(self) -> None:
        """As `BlockStore`; also before the folder was opened, and while it is another engine's."""
        suffix = self._suffix_of(self._begin_generation())
        with self._lock:
            before, self._suffix = self._suffix, suffix
            old = [name for name in self._index if name.endswith(before)]
            for name in reversed(old):
                self._index.move_to_end(name, last=False)
        deadline, left = monotonic() + self._reset_seconds, len(old)
        while left and monotonic() < deadline and self._remove_oldest():
            left -= 1

    def use(self) -> StoreUse:
        """As `BlockStore`."""
        return StoreUse(len(self._index), self._used, self._capacity, self._evicted)

    def close(self) -> None:
        """Let go of the folder; blocks stay."""
        with self._lock:
            for descriptor in (self._folder, self._locked):
                if descriptor >= 0:
                    os.close(descriptor)
            self._folder = self._locked = -1

    def _open_folder(self) -> int:
        if self._folder < 0:
            raise StoreError("closed")
        return self._folder

    def _is_open(self) -> bool:
        """True if the folder that was opened is still the one at its path."""
        if self._folder < 0:
            return False
        try:
            found, held = self._path.stat(), os.fstat(self._folder)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def _begin_generation(self) -> bytes:
        if self._folder >= 0:
            return new_generation(self._folder, self._generation)
        folder = self._open_path()
        try:
            return new_generation(folder, self._generation)
        finally:
            os.close(folder)

    def _open_path(self) -> int:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _open(self) -> None:
        self.close()
        folder = self._open_path()
        locked = -1
        try:
            locked = os.open(LOCK_NAME, _WRITE, 0o600, dir_fd=folder)
            _take(locked)
            suffix = self._suffix_of(read_generation(folder, self._generation))
            found = self._scan(folder)
        except BaseException:
            for descriptor in (folder, locked):
                if descriptor >= 0:
                    os.close(descriptor)
            raise
        with self._lock:
            self._index = OrderedDict((name, space) for _, name, space in sorted(found))
            self._used = sum(self._index.values())
            self._folder, self._locked, self._suffix = folder, locked, suffix
        self._make_room(0)

    def _scan(self, folder: int) -> list[tuple[int, str, int]]:
        """Time of use, name and space of every block; unfinished files of a dead process are removed."""
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                is_new = _TEMPORARY.fullmatch(entry.name) is not None
                if not is_new and _BLOCK.fullmatch(entry.name) is None:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                    if not _ours(status):
                        continue
                    if is_new:
                        os.unlink(entry.name, dir_fd=folder)
                    else:
                        found.append((status.st_mtime_ns, entry.name, _space(status.st_size)))
                except FileNotFoundError:
                    continue
        return found

    def _make_room(self, space: int) -> None:
        """Count `space` as used, and have blocks give way until all fits."""
        with self._lock:
            self._used += space
        while True:
            with self._lock:
                is_full = self._used > self._capacity or len(self._index) + (space > 0) > self._most
            if not is_full or not self._remove_oldest():
                return
            with self._lock:
                self._evicted += 1

    def _remove_oldest(self) -> bool:
        """The block that was not used for longest; False: there is none."""
        with self._lock:
            if not self._index:
                return False
            name, freed = self._index.popitem(last=False)
            self._used -= freed
        try:
            os.unlink(name, dir_fd=self._open_folder())
        except FileNotFoundError:
            pass
        except OSError:  # it is still there, and still the first to go
            with self._lock:
                self._index[name] = freed
                self._index.move_to_end(name, last=False)
                self._used += freed
            raise
        return True

    def _suffix_of(self, generation: bytes) -> str:
        """The ending of the names of this model's blocks."""
        named = sha256(self._fingerprint + generation).digest() if generation else self._fingerprint
        return f".{named[:8].hex()}.kv"

    def _write(self, name: str, header: bytes, data: memoryview) -> None:
        new = _temporary_name()
        folder = self._open_folder()
        try:
            self._write_new(new, (header, data))
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=folder)
            if isinstance(error, IsADirectoryError):  # of that name, which is not ours to remove
                raise StoreMiss from None
            raise

    def _write_new(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        file = os.open(name, _WRITE | os.O_EXCL, 0o600, dir_fd=self._open_folder())
        try:
            written, size = os.writev(file, parts), sum(len(part) for part in parts)
            if written < size:  # the disk is nearly full, or a limit is near: the rest says which
                rest = b"".join(parts)[written:]
                while rest:
                    rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)

    def _is_ours(self, name: str) -> bool:
        try:
            return _ours(os.stat(name, dir_fd=self._open_folder(), follow_symlinks=False))
        except OSError:
            return True

    def _drop(self, name: str) -> None:
        with self._lock:
            self._used -= self._index.pop(name, 0)

    def _remove(self, name: str) -> None:
        self._drop(name)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._open_folder())


def _take(locked: int) -> None:
    """Lock the folder. A process that was killed may take a moment to be gone."""
    for left in range(LOCK_TRIES, 0, -1):
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if left == 1:
                raise StoreError("another engine uses this folder") from None
            sleep(LOCK_SECONDS)
        else:
            return


_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""No links are followed, no pipe is waited for."""
_READ = os.O_RDONLY | _SAFE
_WRITE = os.O_WRONLY | os.O_CREAT | _SAFE


def _ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _space(size: int) -> int:
    return -(-size // _ALLOCATION) * _ALLOCATION


def _temporary_name() -> str:
    return f".{secrets.token_hex(8)}.kv-new"
