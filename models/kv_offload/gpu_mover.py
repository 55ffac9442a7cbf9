"""Blocks between a GPU's cache and pinned host memory, on a stream of their own beside the steps."""

from collections.abc import Iterator, Sequence, Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.kv_offload.block_copy import BlockMover, Move, block_views
from troupellm.models.kv_offload.host_memory import HostBuffer
from troupellm.models.kv_offload.host_tier import BATCH
from troupellm.protocol.messages.kv_transfers import STORES

PIECE = 32
"""Blocks that are gathered together, into memory that is free again when the last of them has been stored."""
MOST_BLOCKS = STORES + PIECE + BATCH
"""Copies on the device at any time: of stores that wait, of the piece that is being stored, and of loads."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Copies of blocks on the device."""

    pieces: list[list[Tensor]]
    """Per `PIECE` blocks, per storage: uint8 [blocks, pieces, bytes]. Empty where all are stored."""
    ready: torch.cuda.Event


class CudaMover(BlockMover):
    """Stores are gathered on the step's stream, before its kernels, into memory where a block is in one piece; from
    there they go to the host one copy each. Loads come back the same way. No step waits for a store to finish.

    Methods that run on a thread wait for the device there, asleep.
    """

    def __init__(self, cache: KVCache, host_buffer: HostBuffer) -> None:
        self._views, self._host_buffer = block_views(cache), host_buffer
        self._device = cache.storage.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def is_storing(self) -> bool:
        """As `BlockMover`."""
        return False

    @torch.inference_mode()
    def begin_stores(self, blocks: Sequence[int]) -> Gathered:
        """As `BlockMover`."""
        pieces = []
        for begin in range(0, len(blocks), PIECE):
            index = self._index(blocks[begin : begin + PIECE])
            pieces.append([view.transpose(0, 1).index_select(0, index) for view in self._views])
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return Gathered(pieces, ready)

    @torch.inference_mode()
    def store(self, begun: Gathered, moves: Sequence[Move]) -> None:
        """As `BlockMover`."""
        with self._copying():
            self._stream.wait_event(begun.ready)
            for move in moves:
                target, begin = self._host_buffer.tensor(move.place), 0
                for part in begun.pieces[move.index // PIECE]:
                    source = part[move.index % PIECE].view(-1)
                    target[begin : begin + source.numel()].copy_(source, non_blocking=True)
                    begin += source.numel()
        for done in begun.pieces[: moves[-1].index // PIECE]:  # moves come in order
            done.clear()

    def forget(self, block: int) -> None:
        """As `BlockMover`."""

    def settle(self, blocks: AbstractSet[int] | None = None) -> None:
        """As `BlockMover`."""

    @torch.inference_mode()
    def load(self, moves: Sequence[Move]) -> None:
        """As `BlockMover`."""
        with self._copying():
            index, begin = self._index([move.block for move in moves]), 0
            for view in self._views:
                pieces, _, size = view.shape
                staged = torch.empty((len(moves), pieces, size), dtype=torch.uint8, device=self._device)
                for row, move in zip(staged, moves, strict=True):
                    part = self._host_buffer.tensor(move.place)[begin : begin + pieces * size]
                    row.view(-1).copy_(part, non_blocking=True)
                view.index_copy_(1, index, staged.transpose(0, 1))
                begin += pieces * size

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks).pin_memory().to(self._device, non_blocking=True)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """On the stream of its own; all that is begun there is done behind it. Where something fails, too: blocks and
        places are used anew then."""
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(self._stream)
                done.synchronize()
