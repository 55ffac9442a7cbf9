"""The host tier: which place of the worker's host memory holds which block."""

from collections.abc import Iterable, Sequence

from troupellm.actors.kv_cache.block_hash import KEY_BYTES
from troupellm.actors.kv_cache.events import BlockEvents
from troupellm.actors.kv_offload.eviction import EvictionPolicy, TierFull
from troupellm.actors.kv_offload.tier import TierBlock


class HostTier:
    """A `TierManager` over numbered places. Every place is free, or one block's; pinned blocks keep theirs."""

    def __init__(self, policy: EvictionPolicy, events: BlockEvents | None = None) -> None:
        """events: hears what can be found, and what cannot any more."""
        self._policy, self._events = policy, events
        if events is not None:
            events.cleared()
        self.num_places = policy.capacity
        self._free = list(range(self.num_places - 1, -1, -1))
        self._blocks: dict[bytes, TierBlock] = {}
        self._dropped: set[TierBlock] = set()
        """Without a name, and pinned."""
        self.num_evicted = 0

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is here, or on its way."""
        return key in self._blocks

    @property
    def num_used(self) -> int:
        return self.num_places - len(self._free)

    def find(self, key: bytes) -> TierBlock | None:
        """A block that could be loaded now."""
        block = self._blocks.get(key)
        return block if block is not None and block.ready else None

    def lookup(self, keys: Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(keys) if self.find(key) is None), len(keys))

    def prepare_store(self, key: bytes) -> TierBlock | None:
        if key in self._blocks or (not self._free and len(self._policy) < self.num_places):
            return None  # it is here; or what was dropped holds places until its transfers end
        try:
            evicted = self._policy.admit(key, self._is_pinned)
        except TierFull:
            return None
        if evicted is not None:
            gone = self._blocks.pop(evicted)
            self._free.append(gone.place)
            self.num_evicted += 1
            self._report_removed(gone)
        block = self._blocks[key] = TierBlock(key, self._free.pop())
        block.pins = 1
        return block

    def complete_store(self, block: TierBlock, *, ok: bool) -> None:
        block.ready = ok
        if not ok:
            self._drop(block)
        elif self._events is not None and not block.dropped:
            self._events.stored(block.key[:KEY_BYTES], int.from_bytes(block.key[KEY_BYTES:]))
        self._unpin(block)

    def prepare_load(self, key: bytes) -> TierBlock | None:
        block = self.find(key)
        if block is not None:
            block.pins += 1
        return block

    def complete_load(self, block: TierBlock, *, ok: bool) -> None:
        if not ok:
            self._drop(block)
        self._unpin(block)

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._blocks:
                self._policy.touch(key)

    def refresh(self, keys: Iterable[bytes]) -> None:
        """As `touch`, for new blocks, which no sequence has asked for."""
        for key in keys:
            if key in self._blocks:
                self._policy.refresh(key)

    def reset(self) -> None:
        """Nothing that is here now is found again."""
        for block in list(self._blocks.values()):
            self._drop(block)

    def end_transfers(self) -> None:
        """None of them will be answered: what was being written is void."""
        for block in [*self._blocks.values(), *self._dropped]:
            if block.pins:
                block.pins = 1
                self.complete_load(block, ok=block.ready)

    def _is_pinned(self, key: bytes) -> bool:
        return self._blocks[key].pins > 0

    def _drop(self, block: TierBlock) -> None:
        if block.dropped:
            return
        block.dropped = True
        self._report_removed(block)
        del self._blocks[block.key]
        self._policy.remove(block.key)
        if block.pins:
            self._dropped.add(block)
        else:
            self._free.append(block.place)

    def _report_removed(self, block: TierBlock) -> None:
        if self._events is not None and block.ready:
            self._events.removed(block.key[:KEY_BYTES], int.from_bytes(block.key[KEY_BYTES:]))

    def _unpin(self, block: TierBlock) -> None:
        block.pins -= 1
        if block.dropped and not block.pins:
            self._dropped.remove(block)
            self._free.append(block.place)

    def assert_invariants(self, num_pins: int) -> None:
        """num_pins: transfers under way that read or write places."""
        blocks = [*self._blocks.values(), *self._dropped]
        places = self._free + [block.place for block in blocks]
        assert sorted(places) == list(range(self.num_places)), "a place of host memory is lost, or somebody's twice"
        assert sum(block.pins for block in blocks) == num_pins, "pins differ from transfers"
        assert all(block.pins for block in self._dropped), "a dropped block waits for nothing"
        assert len(self._policy) == len(self._blocks), "the policy orders other blocks than there are"
        assert all(key in self._policy for key in self._blocks), "the policy does not know a block"
        assert all(block.ready or block.pins for block in blocks), "a block is neither written nor ready"
