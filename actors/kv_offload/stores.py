"""Copies of full blocks that go outward: to host memory, and from there to the tiers behind it."""

from collections import OrderedDict, deque

from troupellm.actors.kv_cache.block_pool import in_group
from troupellm.actors.kv_offload.context import OffloadContext
from troupellm.actors.kv_offload.tier import TierBlock
from troupellm.actors.kv_offload.transfers import OUTER
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.kv_transfers import TransferDone
from troupellm.protocol.messages.worker import NULL_BLOCK

_BACKLOG = 4096
"""Blocks that wait to go to host memory, or to one outer tier, at most."""
_USES_PER_PLACE = 4
"""Uses are counted for so many keys per place of host memory, those looked up last."""


class Stores:
    """A store reads its block before the next plan writes anything, so nothing holds the block for it."""

    def __init__(self, context: OffloadContext, threshold: int) -> None:
        """threshold: uses of a block before it is stored; 0 stores all."""
        self._host, self._transfers, self._tables, self._cost, self._counts = context
        self._threshold = threshold
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._later: deque[tuple[int, bytes]] = deque()
        """(group, key without it) of blocks that no sequence holds and that found no credit."""
        self._spills: dict[int, deque[tuple[int, bytes]]] = {}
        """By tier, (group, key) of blocks that wait to go there."""
        self._given_away: list[tuple[int, int, bytes]] = []
        """(group, block, key) of cached blocks that other work gets with the next plan."""
        self.outward: tuple[int, ...] = ()
        """Outer tiers that take blocks."""

    def use(self, keys: list[bytes]) -> None:
        """A sequence asks for these blocks, wherever they are."""
        if not self._threshold:
            return
        uses = self._uses
        for key in keys:
            uses[key] = uses.pop(key, 0) + 1
        while len(uses) > _USES_PER_PLACE * self._host.num_places:
            uses.popitem(last=False)

    def offer(self, sequence: Sequence, *, last: bool = False, all_of_it: bool = False) -> None:
        """Store the sequence's blocks that others can find, from where the last call ended, as credits allow.

        Args:
            last: the sequence gives its blocks up: what finds no credit is stored later, if it is still there then.
            all_of_it: also what was of little use so far.
        """
        end = sequence.num_cached_blocks
        if sequence.num_offered >= end or sequence.loading is not None or not self._tables.may_cache(sequence):
            return
        keys = self._tables.extend_keys(sequence, end)
        for index in range(sequence.num_offered, end):
            chained = keys[index + 1]
            if self._threshold and not all_of_it and self._uses.get(chained, 0) < self._threshold:
                self._counts.num_filtered += 1
                continue
            for group, table in enumerate(sequence.tables):
                block = table[index]
                key = in_group(chained, group)
                if block == NULL_BLOCK or key in self._host:
                    continue
                if self._transfers.credits("store") <= 0:
                    if not last:
                        sequence.num_offered = index
                        return
                    self._put_off(group, chained)
                elif not self._store(group, block, key):
                    self._counts.num_skipped += 1
        sequence.num_offered = end

    def settle(self, sequence: Sequence) -> None:
        """The sequence is over: its blocks leave host memory from the tail."""
        keys = sequence.keys[1 : sequence.num_offered + 1]
        for group in range(len(sequence.tables)):
            self._host.refresh([in_group(key, group) for key in reversed(keys)] if group else reversed(keys))

    def save(self, group: int, block: int, key: bytes) -> None:
        """Store a block that is given away, if host memory does not have it."""
        if len(self._given_away) < _BACKLOG:
            self._given_away.append((group, block, key))
        else:
            self._counts.num_skipped += 1

    def begin_saves(self) -> None:
        """Before the plan is sealed that gives the blocks away, and after its loads have pinned what they read."""
        saves, self._given_away = self._given_away, []
        for group, block, key in saves:
            if key in self._host:
                continue
            if self._transfers.credits("store") <= 0 or not self._store(group, block, key):
                self._counts.num_skipped += 1

    def pump(self) -> None:
        """Begin what waits for credits; of those of outer tiers fetches keep a part."""
        while self._later and self._transfers.credits("store") > 0:
            group, chained = self._later.popleft()
            block = self._tables.pool.find(chained, group)
            key = in_group(chained, group)
            if key not in self._host and (block is None or not self._store(group, block, key)):
                self._counts.num_skipped += 1
        for tier, waiting in self._spills.items():
            while waiting and self._transfers.credits("spill", tier) > OUTER // 4:
                group, key = waiting.popleft()
                source = self._host.prepare_load(key) if tier in self.outward else None
                if source is None:
                    self._counts.dropped(tier)
                else:
                    self._spill(tier, group, source)

    def _put_off(self, group: int, chained: bytes) -> None:
        if len(self._later) < _BACKLOG:
            self._later.append((group, chained))
        else:
            self._counts.num_skipped += 1

    @property
    def waits(self) -> bool:
        """For credits, to store what sequences have left behind."""
        return bool(self._later)

    @property
    def num_waiting(self) -> int:
        """Blocks that wait to go to outer tiers."""
        return sum(map(len, self._spills.values()))

    def forget(self) -> None:
        self._spills.clear()
        self._later.clear()
        self._given_away.clear()

    def _spill(self, tier: int, group: int, source: TierBlock) -> None:
        def done(answer: TransferDone) -> None:
            self._counts.moved("spill", answer, tier)
            self._host.complete_load(source, ok=True)

        self._transfers.begin(
            "spill", done, place=source.place, key=source.key, group=group, block=NULL_BLOCK, tier=tier
        )

    def _store(self, group: int, block: int, key: bytes) -> bool:
        target = self._host.prepare_store(key)
        if target is None:
            return False

        def done(answer: TransferDone) -> None:
            self._counts.moved("store", answer)
            self._host.complete_store(target, ok=answer.ok)
            if not answer.ok:
                return
            self._cost.learn("store", answer.seconds)
            for tier in self.outward if not target.dropped else ():
                waiting = self._spills.setdefault(tier, deque())
                if len(waiting) >= _BACKLOG:
                    waiting.popleft()
                    self._counts.dropped(tier)
                waiting.append((group, key))

        self._transfers.begin("store", done, place=target.place, key=key, group=group, block=block, tier=0)
        return True
