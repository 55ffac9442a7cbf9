"""A connector as a user installs it: blocks as files in a folder. Its option `ill` says how it misbehaves."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from troupellm import BlockStore, ConnectorContext, StoreMiss, StoreUse

RELEASED = threading.Event()
"""Hanging calls wait for this."""
OPENED_BY = "opened-by"
"""A file with the number of the process that opened the folder last."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    ill: str = "well"


class ToyStore(BlockStore):
    def __init__(self, folder: Path, frame_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OPENED_BY).write_text(str(os.getpid()))
        self.folder, self.frame_bytes = folder, frame_bytes

    def contains(self, keys: Sequence[bytes]) -> Any:
        return next((count for count, key in enumerate(keys) if not self._path(key).exists()), len(keys))

    def put(self, key: bytes, data: memoryview) -> None:
        assert len(data) == self.frame_bytes
        unfinished = self._path(key).with_suffix(".new")
        unfinished.write_bytes(data)
        unfinished.replace(self._path(key))

    def get(self, key: bytes, into: memoryview) -> None:
        try:
            into[:] = self._path(key).read_bytes()
        except FileNotFoundError:
            raise StoreMiss from None

    def reset(self) -> None:
        for path in self.folder.glob("*.kv"):
            path.unlink()

    def close(self) -> None:
        """The files stay."""

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.kv"


class Raises(ToyStore):
    def get(self, key: bytes, into: memoryview) -> None:
        raise RuntimeError("a bug")


class Hangs(ToyStore):
    def get(self, key: bytes, into: memoryview) -> None:
        RELEASED.wait()
        super().get(key, into)


class Denies(ToyStore):
    """Does not give what it said it has."""

    def get(self, key: bytes, into: memoryview) -> None:
        raise StoreMiss


class Swaps(ToyStore):
    """Gives another block, whole."""

    def get(self, key: bytes, into: memoryview) -> None:
        others = (path for path in self.folder.glob("*.kv") if path != self._path(key))
        into[:] = next(others).read_bytes()


class Forges(ToyStore):
    """Gives this block with other content."""

    def get(self, key: bytes, into: memoryview) -> None:
        super().get(key, into)
        into[-8:] = bytes(byte ^ 0x55 for byte in into[-8:])


class Overcounts(ToyStore):
    def contains(self, keys: Sequence[bytes]) -> Any:
        return len(keys) + 1


class Miscounts(ToyStore):
    def contains(self, keys: Sequence[bytes]) -> Any:
        return len(keys) - 0.5


class Stalls(ToyStore):
    """Hangs as soon as it is asked for anything."""

    def contains(self, keys: Sequence[bytes]) -> Any:
        RELEASED.wait()
        return super().contains(keys)

    def probe(self) -> None:
        """All seems well."""


class Breaks(ToyStore):
    """Does nothing but raise, once it is made."""

    def contains(self, keys: Sequence[bytes]) -> Any:
        raise KeyError(keys)

    def put(self, key: bytes, data: memoryview) -> None:
        raise KeyError(key)

    def get(self, key: bytes, into: memoryview) -> None:
        raise KeyError(key)

    def reset(self) -> None:
        raise KeyError

    def probe(self) -> None:
        raise SystemExit(3)

    def use(self) -> StoreUse:
        raise KeyError

    def close(self) -> None:
        raise KeyError


ILL_WHEN_READ = {"raises": Raises, "hangs": Hangs, "denies": Denies, "swaps": Swaps, "forges": Forges}
ILL_BEFORE = {"overcounts": Overcounts, "miscounts": Miscounts, "stalls": Stalls, "breaks": Breaks}


def open_toy(context: ConnectorContext) -> BlockStore:
    options = context.options(Options)
    kind = {"well": ToyStore, **ILL_WHEN_READ, **ILL_BEFORE}[options.ill]
    return kind(Path(options.path), context.frame_bytes)
