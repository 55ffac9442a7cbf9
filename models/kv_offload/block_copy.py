"""Copies blocks between the device and the host buffer.

A block id's content is contiguous per layer and tensor, in every storage of the cache: keys and values of the model's
layers in any number type, latent vectors, and a drafter's entries. All of it is moved as bytes, and is contiguous in
the host buffer. The block's cache group does not matter: blocks of all groups have the same size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass
from threading import Condition
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.kv_offload.host_memory import HostBuffer


@dataclass(frozen=True, slots=True)
class Move:
    index: int
    """Among the blocks that were begun together."""
    block: int
    place: int


def block_views(cache: KVCache) -> list[torch.Tensor]:
    """Per storage, its memory as bytes; uint8 [pieces, blocks, bytes of a piece]."""
    views = []
    for storage in cache.storages:
        pieces = storage.shape[0] * storage.shape[1]
        views.append(storage.view(torch.uint8).view(pieces, storage.shape[2], -1))
    return views


def bytes_of_block(cache: KVCache) -> int:
    """Bytes of one block id, in all storages together."""
    return sum(view.shape[0] * view.shape[2] for view in block_views(cache))


class BlockMover(ABC):
    """Moves blocks between one cache and one host buffer."""

    @abstractmethod
    def begin_stores(self, blocks: Sequence[int]) -> Any:
        """On the step's thread: mark the blocks' present content as that which `store` copies.

        Returns:
            the argument of `store` for them.
        """

    @abstractmethod
    def store(self, begun: Any, moves: Sequence[Move]) -> None:
        """On a thread: copy blocks that were begun together; done on return."""

    @abstractmethod
    def forget(self, block: int) -> None:
        """A store that was begun is not made after all. On any thread."""

    @property
    @abstractmethod
    def is_storing(self) -> bool:
        """Some block must not be written to yet."""

    @abstractmethod
    def settle(self, blocks: AbstractSet[int] | None = None) -> None:
        """On the step's thread, before the blocks (None: any) are written to: wait until stores have read them."""

    @abstractmethod
    def load(self, moves: Sequence[Move]) -> None:
        """On a thread: copy places to blocks that no step reads; done on return."""


class MemoryMover(BlockMover):
    """For a cache in the machine's own memory. A block is read by the thread that stores it, beside the step; a step
    that is about to write to it waits for that."""

    def __init__(self, cache: KVCache, host_buffer: HostBuffer) -> None:
        self._views = [view.numpy() for view in block_views(cache)]
        self._host_buffer = host_buffer
        self._unread: dict[int, int] = {}
        """By block, the number of stores that have not read it yet."""
        self._read = Condition()

    def begin_stores(self, blocks: Sequence[int]) -> None:
        """As `BlockMover`."""
        with self._read:
            for block in blocks:
                self._unread[block] = self._unread.get(block, 0) + 1

    def store(self, begun: None, moves: Sequence[Move]) -> None:
        """As `BlockMover`. The interpreter's lock is not held while bytes move."""
        left = list(moves)
        try:
            while left:
                for view, part in self._parts(left[-1].place):
                    np.copyto(part, view[:, left[-1].block])
                self.forget(left.pop().block)
        finally:  # also after an error: no store may stay marked as unread
            for move in left:
                self.forget(move.block)

    def forget(self, block: int) -> None:
        """As `BlockMover`."""
        with self._read:
            left = self._unread.pop(block) - 1
            if left:
                self._unread[block] = left
            self._read.notify_all()

    @property
    def is_storing(self) -> bool:
        """As `BlockMover`."""
        return bool(self._unread)

    def settle(self, blocks: AbstractSet[int] | None = None) -> None:
        """As `BlockMover`."""
        if not self._unread:
            return
        with self._read:
            self._read.wait_for(lambda: not (self._unread if blocks is None else self._unread.keys() & blocks))

    def load(self, moves: Sequence[Move]) -> None:
        """As `BlockMover`."""
        for move in moves:
            for view, part in self._parts(move.place):
                np.copyto(view[:, move.block], part)

    def _parts(self, place: int) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Each storage [pieces, blocks, bytes], and its part of a place [pieces, bytes]."""
        memory, begin = self._host_buffer[place], 0
        for view in self._views:
            size = view.shape[0] * view.shape[2]
            yield view, memory[begin : begin + size].reshape(view.shape[0], view.shape[2])
            begin += size
