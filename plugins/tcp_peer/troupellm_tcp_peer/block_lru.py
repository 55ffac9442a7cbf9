"""The blocks that an engine offers to its peers: the ones put there last, as many as fit."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from troupellm import BlockSignature, StoreUse


class BlockLru:
    """Signed blocks in memory, least recently used ones give way. Safe in any thread."""

    def __init__(self, signature: BlockSignature, limit: int) -> None:
        """limit: bytes of all blocks, at least one."""
        self._signature = signature
        self._most = limit // signature.frame_bytes
        self._blocks: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._evicted = self._clearings = 0

    def put(self, key: bytes, data: memoryview) -> None:
        """Copy a block, unless it is there."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return
            clearings = self._clearings
        header, content = self._signature.header(key, data), bytes(data)
        with self._lock:
            if clearings != self._clearings:  # the blocks were cleared meanwhile, and this block is older
                return
            self._blocks[key] = header, content
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)
                self._evicted += 1

    def find(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Header and content."""
        with self._lock:
            found = self._blocks.get(key)
            if found is not None:
                self._blocks.move_to_end(key)
            return found

    def count(self, keys: Sequence[bytes]) -> int:
        """The number of keys that are there, from the first on; they are used soon, so others are evicted first."""
        with self._lock:
            for index, key in enumerate(keys):
                if key not in self._blocks:
                    return index
                self._blocks.move_to_end(key)
        return len(keys)

    def use(self) -> StoreUse:
        size, blocks = self._signature.frame_bytes, len(self._blocks)
        return StoreUse(blocks, blocks * size, self._most * size, self._evicted)

    def clear(self) -> None:
        """Forget all blocks, and those that are being put."""
        with self._lock:
            self._blocks.clear()
            self._clearings += 1
