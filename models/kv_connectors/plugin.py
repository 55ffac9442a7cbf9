"""Guards a plug-in's store: none of its mistakes can produce a wrong token, or delay or fail a step.

Blocks are sealed before the plug-in gets them and count only if the seal is whole when they come back. A plug-in that
loses, mixes up or invents blocks costs misses. Its answers are checked before they are used, its numbers are read where
it may take its time, and its exceptions become errors of its tier. The rest (deadlines, being left alone and tried
again) is what `offload/tier.py` does with every store.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from operator import index
from threading import Lock, Thread
from typing import Final

from troupellm.models.kv_connectors.sealed_block import HEADER_BYTES, BlockSignature
from troupellm.models.kv_offload.store import BlockStore, StoreError, StoreMiss, StoreUse

logger = logging.getLogger("troupellm.worker")

CLOSE_SECONDS = 5.0
"""Longest wait for its `close`."""
_MOST: Final = 2**63
"""Its numbers go through frames, where they have 64 bits."""


class PlugInStore(BlockStore):
    """Around the store that a plug-in made."""

    def __init__(self, store: BlockStore, signature: BlockSignature) -> None:
        self._store, self._signature = store, signature
        self._use = StoreUse()
        self._looks = count(1)
        self._newest = 0
        """Number of the query that `_use` is from."""
        self._lock = Lock()

    def contains(self, keys: Sequence[bytes]) -> int:
        with self._its_errors():
            found = int(index(self._store.contains(keys)))
            if not 0 <= found <= len(keys):
                raise StoreError(f"it says that it has {found} of {len(keys)} blocks")
            return found

    def put(self, key: bytes, data: memoryview) -> None:
        frame = memoryview(b"".join((self._signature.header(key, data), data)))
        with self._its_errors():
            self._store.put(key, frame)
        self._look()

    def get(self, key: bytes, into: memoryview) -> None:
        frame = memoryview(bytearray(self._signature.frame_bytes))
        with self._its_errors():
            self._store.get(key, frame)
        into[:] = frame[HEADER_BYTES:]  # checked where the plug-in cannot write any more
        self._signature.check(key, frame[:HEADER_BYTES], into)

    def reset(self) -> None:
        with self._its_errors():
            self._store.reset()
        self._look()

    def probe(self) -> None:
        with self._its_errors():
            self._store.probe()
        self._look()

    def use(self) -> StoreUse:
        """As it was after the last change: the step's thread runs none of the plug-in's code."""
        return self._use

    def close(self) -> None:
        """Close the plug-in's store on a thread; the thread is abandoned after `CLOSE_SECONDS`."""
        closing = Thread(target=self._close, name=f"troupellm-kv-{self.name}-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("the connector %s does not close; a thread of it was left behind", self.name)

    def _close(self) -> None:
        try:
            self._store.close()
        except BaseException as error:  # others are closed behind it
            logger.warning("the connector %s could not be closed", self.name, exc_info=error)

    def _look(self) -> None:
        """Side by side, since one of them may hang; the numbers of the newest one are those that stay."""
        number = next(self._looks)
        with self._its_errors():
            use = self._store.use()
            said = use.blocks, use.used_bytes, use.capacity_bytes, use.evicted
            numbers = [int(index(each)) for each in said]
            if not all(0 <= each < _MOST for each in numbers):
                raise StoreError("its report of its use is not valid")
            with self._lock:
                if number > self._newest:
                    self._newest, self._use = number, StoreUse(*numbers)

    @contextmanager
    def _its_errors(self) -> Iterator[None]:
        """A miss stays one; all else becomes a `StoreError`, in words that fit into frames, metrics and the log."""
        try:
            yield
        except StoreMiss:
            raise
        except StoreError as error:
            raise StoreError(_plain(error)) from error
        except OSError as error:
            raise StoreError(_plain(error.strerror or type(error).__name__)) from error
        except BaseException as error:  # a bug of its own, on a thread that others wait for
            logger.warning("the connector %s is at fault", self.name, exc_info=error)
            raise StoreError(type(error).__name__) from error


def _plain(said: object) -> str:
    return str(said).encode("utf-8", "backslashreplace").decode()
