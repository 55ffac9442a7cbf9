"""The host tier's memory: places of one block each, apart from the KV cache's."""

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from troupellm.kernels.common.huge_pages import prefer_huge_pages
from troupellm.models.kv_offload.pinning import pin, unpin
from troupellm.models.processes.process_limits import available_memory
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError


class HostBuffer:
    """Memory of a fixed number of blocks. A block's parts of all layers lie one behind the other.

    On a CPU-only machine the system hands out pages as they are first written to; beside a GPU all of it is pinned at
    once, so that the device copies without a detour.

    Attributes:
        checksums: of each place's content, set by the thread that wrote it.
    """

    def __init__(self, places: int, block_bytes: int, *, pinned: bool = False) -> None:
        self.places, self.block_bytes, self.pinned = places, block_bytes, pinned
        self.checksums = [0] * places
        self._memory: torch.Tensor | None = None
        self._unpin: weakref.finalize[..., HostBuffer] | None = None
        """Unpins the memory; also called when the host buffer is garbage-collected."""
        self._array = np.empty((0, block_bytes), np.uint8)
        self.reserve()

    def reserve(self) -> None:
        """Take the memory, if it was given back.

        Raises:
            ConfigError: it cannot be pinned.
        """
        if self._memory is not None:
            return
        size = self.places * self.block_bytes
        memory = torch.empty(size, dtype=torch.uint8)
        prefer_huge_pages(memory.data_ptr(), size, written=False)
        if self.pinned:
            pin(memory)
            self._unpin = weakref.finalize(self, unpin, memory)
            self._unpin.atexit = False
        self._memory, self._array = memory, memory.numpy().reshape(self.places, self.block_bytes)

    def release(self) -> None:
        """Free the memory with its content. No view of a place may be in use any more."""
        if self._unpin is not None:
            self._unpin()
        self._array = np.empty((0, self.block_bytes), np.uint8)
        self._memory = self._unpin = None

    def __getitem__(self, place: int) -> NDArray[np.uint8]:
        """View of one place; uint8 [block_bytes]."""
        view: NDArray[np.uint8] = self._array[place]
        return view

    def tensor(self, place: int) -> torch.Tensor:
        """One place's memory as a tensor."""
        assert self._memory is not None, "the arena's memory was given back"
        return self._memory[place * self.block_bytes :][: self.block_bytes]


def host_slots(config: EngineConfig, block_bytes: int) -> int:
    """How many blocks the wanted host tier holds; 0 if none is wanted.

    Raises:
        ConfigError: it holds not one.
    """
    size = config.offload.host_bytes
    if not size:
        return 0
    if size < block_bytes:
        raise ConfigError(
            f"kv_offloading_size: {size} bytes do not hold one KV block of {block_bytes}", param="kv_offloading_size"
        )
    return size // block_bytes


def memory_left(config: EngineConfig) -> int | None:
    """Bytes of this machine's memory that are free beside the host tier; None without a tier, which needs no check.

    Raises:
        ConfigError: it does not fit.
    """
    size = config.offload.host_bytes
    if not size:
        return None
    free = available_memory()
    if size >= free:
        raise ConfigError(
            f"kv_offloading_size: {size} bytes do not fit: {free} bytes of memory are free", param="kv_offloading_size"
        )
    return free - size
