"""Sequences whose blocks come back from host memory: they hold device blocks and wait for what is loaded into them."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from troupellm.actors.kv_offload.context import OffloadContext
from troupellm.actors.kv_offload.tier import TierBlock
from troupellm.actors.sequences.parts import HostHit
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.kv_transfers import TransferDone

UNHARMED = frozenset({"cancelled", "busy"})
"""Errors that say nothing against what lies in host memory."""


class _Wanted(NamedTuple):
    hit: HostHit
    source: TierBlock


class Loading:
    """The loads that one sequence waits for."""

    __slots__ = ("deadline", "failed", "pending", "started", "waiting")

    def __init__(self, deadline: float, *, started: bool) -> None:
        self.deadline = deadline
        self.started = started
        """Its request had not been scheduled before."""
        self.pending: set[int] = set()
        """Transfers under way into its blocks."""
        self.waiting: deque[_Wanted] = deque()
        """For a credit."""
        self.failed = False


class Loads:
    def __init__(self, context: OffloadContext, timeout: float, ended: Callable[[Sequence, Loading], None]) -> None:
        """
        Args:
            timeout: seconds without progress after which a sequence goes on without the rest.
            ended: hears that nothing is under way any more into the blocks of a sequence that still waits.
        """
        self._host, self._transfers, self._tables, self._cost, self._counts = context
        self._timeout = timeout
        self._ended = ended
        self._waiting: dict[int, Sequence] = {}

    def begin(self, sequence: Sequence, now: float, *, started: bool) -> None:
        """Load what `BlockTables.admit` found for a sequence, which is LOADING."""
        loading = sequence.tiers.loading = Loading(now + self._timeout, started=started)
        for hit in sequence.tiers.host_hits:
            source = self._host.prepare_load(hit.key)
            assert source is not None, "host memory lost a block between its look-up and its load"
            loading.waiting.append(_Wanted(hit, source))
        sequence.tiers.host_hits = []
        self._waiting[sequence.row] = sequence
        self._start(sequence, loading)

    def pump(self, now: float) -> None:
        """Begin what waits for credits; give up what takes too long."""
        for sequence in list(self._waiting.values()):
            loading = sequence.tiers.loading
            assert isinstance(loading, Loading)
            if loading.deadline <= now:
                self._counts.num_timeouts += 1
                loading.failed = sequence.tiers.gave_up = True
                self._ended(sequence, loading)
            elif loading.waiting:
                self._start(sequence, loading)

    def renew(self, now: float) -> None:
        """Everybody has as much time as if it had just begun to wait."""
        for sequence in self._waiting.values():
            assert isinstance(sequence.tiers.loading, Loading)
            sequence.tiers.loading.deadline = now + self._timeout

    def drop(self, sequence: Sequence) -> set[int]:
        """Stop waiting. Returns the transfers that must end before the blocks are free; each leaves the set when it
        ends."""
        loading, sequence.tiers.loading = sequence.tiers.loading, None
        assert isinstance(loading, Loading)
        del self._waiting[sequence.row]
        while loading.waiting:
            self._host.complete_load(loading.waiting.popleft().source, ok=True)
        for transfer in loading.pending:
            self._transfers.cancel(transfer)
        return loading.pending

    def forget(self) -> None:
        """The worker is gone, and every transfer with it."""
        for sequence in self._waiting.values():
            sequence.tiers.loading = None
        self._waiting.clear()

    def _start(self, sequence: Sequence, loading: Loading) -> None:
        while loading.waiting and self._transfers.credits("load") > 0:
            if self._tables.being_copied(loading.waiting[0].hit.block):
                return  # the block's last owner copies it with this plan, or with one still in flight
            wanted = loading.waiting.popleft()
            hit, source = wanted

            def done(answer: TransferDone, wanted: _Wanted = wanted) -> None:
                self._done(sequence, loading, wanted, answer)

            loading.pending.add(
                self._transfers.begin(
                    "load", done, place=source.place, key=hit.key, group=hit.group, block=hit.block, tier=0
                )
            )

    def _done(self, sequence: Sequence, loading: Loading, wanted: _Wanted, answer: TransferDone) -> None:
        hit, source = wanted
        loading.pending.remove(answer.transfer)
        self._counts.moved("load", answer)
        if answer.ok:
            self._cost.learn("load", answer.seconds)
            source.origin = 0
            self._tables.cache_loaded_block(hit, sequence.request.adapter_name)
        unharmed = answer.ok or answer.error in UNHARMED
        self._host.complete_load(source, ok=unharmed)
        if sequence.tiers.loading is not loading:
            return
        if not answer.ok:
            loading.failed = True
            # It would be found again, and might not come again.
            sequence.tiers.gave_up = sequence.tiers.gave_up or unharmed
        loading.deadline = self._counts.now + self._timeout
        if loading.failed:  # what comes behind it is of no use without it
            while loading.waiting:
                self._host.complete_load(loading.waiting.popleft().source, ok=True)
        if not loading.pending and not loading.waiting:
            self._ended(sequence, loading)
