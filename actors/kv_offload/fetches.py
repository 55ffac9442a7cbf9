"""Sequences that ask outer tiers for blocks: first how many there are, then for the blocks, into host memory.

They hold no device blocks meanwhile and are not in the waiting queue, where others go past them. Each asks once and
waits a bounded time; then it goes back, and is admitted with what has arrived. One whose prefix is longer than host
memory has places for asks again for the rest, when what has arrived is on the device.
"""

from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from troupellm.actors.kv_cache.block_pool import in_group
from troupellm.actors.kv_offload.context import OffloadContext
from troupellm.actors.kv_offload.cost import fetch_from
from troupellm.actors.kv_offload.loads import UNHARMED
from troupellm.actors.kv_offload.tier import TierBlock
from troupellm.actors.kv_offload.transfers import LOOKUPS
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.kv_transfers import TransferDone
from troupellm.protocol.messages.worker import NULL_BLOCK

_HOST_SHARE = 0.75
"""Of host memory that one sequence may fill at once: more would push out its own beginning."""


class _Wanted(NamedTuple):
    tier: int
    group: int
    key: bytes


class _Fetch(NamedTuple):
    transfer: int
    tier: int
    waiting: "list[Ask]"
    """Sequences that wait for it."""


class Ask:
    """The state of one sequence that waits for outer tiers."""

    __slots__ = ("counts", "deadline", "first", "keys", "latest", "lookups", "pending", "waiting")

    def __init__(self, keys: list[bytes], first: int, deadline: float) -> None:
        self.keys = keys
        """Keys of the prefix chain that no nearer tier has, and those behind them."""
        self.first = first
        """Number of blocks before them."""
        self.deadline = self.latest = deadline
        """When the sequence goes on if no block comes before (`deadline`), and when it goes on in any case
        (`latest`)."""
        self.lookups: dict[int, int] = {}
        """Not answered: (look-up -> tier)."""
        self.counts: dict[int, int] = {}
        """Of the keys, how many a tier has."""
        self.waiting: deque[_Wanted] = deque()
        """Blocks to fetch, first block first."""
        self.pending: set[bytes] = set()
        """Keys of blocks on their way."""


class Fetches:
    def __init__(
        self,
        context: OffloadContext,
        timeout: float,
        ended: Callable[[Sequence], None],
        missed: Callable[[Sequence, int], None],
    ) -> None:
        """
        Args:
            timeout: seconds without an answer after which a sequence goes on without it; for all of its blocks together
                it waits no longer than that and what computing them takes, unless it may not compute them.
            ended: hears that a sequence has nothing more to wait for.
            missed: hears before that if a tier did not give a sequence what it said it has.
        """
        self._host, self._transfers, self._tables, self._cost, self._counts = context
        self._missed = missed
        self._timeout = timeout
        self._ended = ended
        self._asking: dict[int, Sequence] = {}
        self._fetching: dict[bytes, _Fetch] = {}
        """By key."""
        self.inward: tuple[int, ...] = ()
        """Outer tiers that give blocks, nearest first."""
        self.strict: frozenset[int] = frozenset()
        """Those whose blocks may not be computed instead: one that gives block after block is waited for."""

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._asking)

    @property
    def full(self) -> bool:
        """True if no other sequence may ask before an answer comes."""
        return len(self._asking) >= LOOKUPS or self._transfers.num_lookups + len(self.inward) > LOOKUPS

    def paying(self) -> tuple[int, ...]:
        """Outer tiers that bring blocks sooner than they are computed."""
        return tuple([tier for tier in self.inward if self._cost.fetch_pays(tier)])

    def begin(self, sequence: Sequence, keys: list[bytes], first: int) -> None:
        """Ask for `keys`, of the blocks behind the first ones; there is at least one. The sequence is LOADING."""
        ask = sequence.loading = Ask(keys, first, self._counts.now + self._timeout)
        self._asking[sequence.row] = sequence
        group = self._tables.windows.index(None) if None in self._tables.windows else 0
        named = tuple([in_group(key, group) for key in keys])
        for tier in self.paying():

            def found(count: int, tier: int = tier) -> None:
                self._found(sequence, ask, tier, count)

            lookup = self._transfers.ask(tier, named, found)
            ask.lookups[tier] = lookup

    def pump(self, now: float) -> None:
        """Begin what waits for credits; send those on who have waited long enough."""
        for sequence in list(self._asking.values()):
            ask = sequence.loading
            assert isinstance(ask, Ask)
            if ask.deadline <= now:
                self._counts.num_timeouts += 1
                if ask.lookups and ask.counts and not ask.waiting and not ask.pending:
                    self._choose(sequence, ask)  # one tier has answered, another one takes its time
                    for lookup in ask.lookups.values():
                        self._transfers.forget_lookup(lookup)
                    ask.lookups.clear()
                    self._start(sequence, ask)
                else:
                    sequence.asks_again = False
                    if ask.pending:
                        self._missed(sequence, self._fetching[next(iter(ask.pending))].tier)
                    self._ended(sequence)
            elif ask.waiting:
                self._start(sequence, ask)

    def renew(self) -> None:
        """Everybody has at least as much time as if it had just begun to wait."""
        for sequence in self._asking.values():
            assert isinstance(sequence.loading, Ask)
            sequence.loading.latest = max(sequence.loading.latest, self._counts.now + self._timeout)
            self._progressed(sequence.loading)

    def drop(self, sequence: Sequence) -> None:
        """The sequence waits no longer."""
        ask, sequence.loading = sequence.loading, None
        assert isinstance(ask, Ask)
        del self._asking[sequence.row]
        for lookup in ask.lookups.values():
            self._transfers.forget_lookup(lookup)
        for key in ask.pending:
            fetch = self._fetching[key]
            fetch.waiting.remove(ask)
            if not fetch.waiting:
                self._transfers.cancel(fetch.transfer)
        ask.pending.clear()

    def forget(self) -> None:
        """The worker is gone, and every transfer with it."""
        for sequence in self._asking.values():
            sequence.loading = None
        self._asking.clear()
        self._fetching.clear()

    def _found(self, sequence: Sequence, ask: Ask, tier: int, count: int) -> None:
        del ask.lookups[tier]
        count = max(0, min(count, len(ask.keys)))
        ask.counts[tier] = count
        self._counts.looked_up(tier, len(ask.keys), count)
        ask.deadline = self._counts.now + self._timeout
        if not ask.lookups:
            self._choose(sequence, ask)
            self._start(sequence, ask)

    def _choose(self, sequence: Sequence, ask: Ask) -> None:
        """Which block to fetch from where: the nearest tier that has it, for every group that will look at it."""
        windows, size, pool = self._tables.windows, self._tables.block_size, self._tables.pool
        most = max(1, int(_HOST_SHARE * self._host.num_places) // len(windows))
        counts = {tier: ask.counts.get(tier, 0) for tier in self.inward}  # one that answered may be left alone by now
        found = max(counts.values(), default=0)
        count = min(found, most)
        sequence.asks_again = 0 < count < found
        end = (ask.first + count) * size
        seen = [0 if window is None else max(0, end + 1 - window) // size for window in windows]
        for index in range(count):
            tier = next(tier for tier, has in counts.items() if has > index)
            for group, first in enumerate(seen):
                key = in_group(ask.keys[index], group)
                if ask.first + index < first or pool.find(ask.keys[index], group) is not None:
                    continue
                if key not in self._host or key in self._fetching:
                    ask.waiting.append(_Wanted(tier, group, key))
        ask.latest = self._counts.now + self._timeout + self._cost.computing(count)
        if any(wanted.tier in self.strict for wanted in ask.waiting):
            ask.latest = inf
        self._progressed(ask)

    def _start(self, sequence: Sequence, ask: Ask) -> None:
        """Fetch as much as there are credits for, or wait for another sequence's fetch of the same block."""
        while ask.waiting:
            wanted = ask.waiting[0]
            under_way = self._fetching.get(wanted.key)
            if under_way is not None:
                if not under_way.waiting:
                    return  # its sequence has given it up: it ends soon, and is fetched anew if it is needed
                under_way.waiting.append(ask)
                ask.pending.add(wanted.key)
            elif self._transfers.credits("fetch", wanted.tier) <= 0:
                return
            else:
                target = self._host.prepare_store(wanted.key)
                if target is None:  # the block was stored meanwhile, or there is no place
                    if wanted.key not in self._host:
                        ask.waiting.clear()
                        break
                else:
                    self._fetch(ask, wanted, target)
            ask.waiting.popleft()
        if not ask.pending:
            self._ended(sequence)
        else:
            self._progressed(ask)

    def _progressed(self, ask: Ask) -> None:
        ask.deadline = min(self._counts.now + self._timeout, ask.latest)

    def _fetch(self, ask: Ask, wanted: _Wanted, target: TierBlock) -> None:
        tier, group, key = wanted

        def done(answer: TransferDone) -> None:
            self._fetched(tier, target, answer)

        transfer = self._transfers.begin(
            "fetch", done, place=target.place, key=key, group=group, block=NULL_BLOCK, tier=tier
        )
        self._fetching[key] = _Fetch(transfer, tier, [ask])
        ask.pending.add(key)

    def _fetched(self, tier: int, target: TierBlock, answer: TransferDone) -> None:
        self._counts.moved("fetch", answer, tier)
        if answer.ok:
            self._cost.learn(fetch_from(tier), answer.seconds)
            target.origin = tier
        self._host.complete_store(target, ok=answer.ok)
        waiting = self._fetching.pop(target.key).waiting
        if tier in self.strict and answer.ok:  # it is nearer to all who wait behind this one
            for sequence in self._asking.values():
                assert isinstance(sequence.loading, Ask)
                self._progressed(sequence.loading)
        for ask in waiting:
            ask.pending.remove(target.key)
            self._progressed(ask)
            if not answer.ok:
                ask.waiting.clear()  # what comes behind it is of no use without it
        for sequence in [sequence for sequence in self._asking.values() if sequence.loading in waiting]:
            if not answer.ok and answer.error not in UNHARMED:
                self._missed(sequence, tier)
            sequence.asks_again = sequence.asks_again and answer.ok
            asked = sequence.loading
            if isinstance(asked, Ask) and not asked.pending and not asked.waiting and not asked.lookups:
                self._ended(sequence)
