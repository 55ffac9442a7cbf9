"""The interface of an outer tier of KV blocks: it keeps bytes under keys, and may lose them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from troupellm.protocol.config.kv_connectors import FailurePolicy


class StoreMiss(Exception):
    """The store has no such block. Nothing is wrong with it."""


class StoreCorrupt(StoreMiss):
    """The content under the key is damaged, short, misnamed or of another model: a miss that is counted."""


class StoreError(Exception):
    """The store does not work: full, unreachable, not permitted. It is left alone for a while. An `OSError` means the
    same."""


@dataclass(frozen=True, slots=True)
class StoreContext:
    """Properties of the blocks that a store keeps."""

    fingerprint: bytes
    """32 bytes, from the model and the layout of its KV blocks. Blocks with another fingerprint are useless."""
    block_bytes: int
    """Every block has this size; plug-ins are given them sealed, see `ConnectorContext.frame_bytes`."""
    timeout: float
    """Seconds after which the tier gives an operation up; a store that can stop itself does so, too."""


@dataclass(frozen=True, slots=True)
class StoreUse:
    """A store's figures for metrics; zeros where it does not know them."""

    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    evicted: int = 0
    """Since the store was opened."""


class BlockStore(ABC):
    """Keeps blocks under keys.

    Methods are called on threads of the transfer engine, several at a time, and may block. They raise `StoreMiss`,
    `StoreError` or `OSError`, nothing else. If `get` raises, the bytes that it has written are ignored. `data` and
    `into` are writable or not as their direction says, contiguous, of `block_bytes`, and must not be kept after the
    return.
    """

    name: str = "store"
    """Name in metrics and the log."""
    loads: bool = True
    """`get` may be called."""
    stores: bool = True
    """`put` may be called."""
    signs_blocks: bool = False
    """Blocks that leave the engine are sealed and checked by the store itself; else a plug-in is given them sealed."""
    failure_policy: FailurePolicy = "recompute"
    """The fate of a sequence whose blocks `contains` has reported and `get` does not return."""

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> int:
        """The number of keys that are there, from the first one up to the first missing one."""

    @abstractmethod
    def put(self, key: bytes, data: memoryview) -> None:
        """Keep a block. One that is there already may stay: equal keys hold equal blocks."""

    @abstractmethod
    def get(self, key: bytes, into: memoryview) -> None:
        """Read a block whole and verified.

        Raises:
            StoreMiss: it is not there; `StoreCorrupt` where something else is.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget every block: none that was put before this returned is found again, by this engine or another one, in
        this life or a later one. It is called while nothing else is, and may leave it to time that bytes are freed.

        Raises:
            StoreError, OSError: it could not; it is tried again before the store is asked anything.
        """

    def probe(self) -> None:
        """Find out whether the store works (again). It is called while nothing else is.

        Raises:
            StoreError, OSError: it does not.
        """
        self.contains(())

    def use(self) -> StoreUse:
        """The store's figures, from memory; called on the step's thread."""
        return StoreUse()

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; blocks that are meant to last stay. Called once, when no other call is under way or
        those that are have been given up."""
