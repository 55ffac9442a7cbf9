"""The scheduler's side of KV offload: blocks that leave the device, blocks that come back, and sequences that wait.

A full block is copied to host memory once it is confirmed, and from there to the outer tiers. A sequence that is
admitted takes what the device has, then what host memory has: it is LOADING, with its blocks, until that is loaded.
Blocks that only outer tiers have are fetched into host memory before, while the sequence is LOADING without blocks. All
of this waits only for the worker's answers, of which each comes once. So every wait is bounded, and the blocks of
LOADING sequences always come back.

A block that does not come (a miss, a damaged one, a late one) costs its sequence the admission: it goes back to the
waiting queue, and what did come is found on the device. Beam searches stay on the device, because their sequences are
moved together.
"""

from collections import Counter
from collections.abc import Callable

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.kv_cache.events import BlockEvents, KVEventLog
from troupellm.actors.kv_cache.prefix_search import first_seen
from troupellm.actors.kv_offload.context import OffloadContext
from troupellm.actors.kv_offload.cost import Cost, fetch_from
from troupellm.actors.kv_offload.eviction import make_policy
from troupellm.actors.kv_offload.fetches import Ask, Fetches
from troupellm.actors.kv_offload.host_slots import HostTier
from troupellm.actors.kv_offload.loads import Loading, Loads
from troupellm.actors.kv_offload.prefetches import Prefetches
from troupellm.actors.kv_offload.resets import Resets
from troupellm.actors.kv_offload.stats import Counts
from troupellm.actors.kv_offload.stores import Stores
from troupellm.actors.kv_offload.transfers import Transfers
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.scheduler.waiting_queue import WaitingQueue
from troupellm.actors.sequences.sequence import Event, Request, Sequence
from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.errors import KVLoadFailed
from troupellm.protocol.messages.kv_transfers import BlockTransfer, TierLookup
from troupellm.protocol.messages.snapshot import OffloadSnapshot
from troupellm.protocol.messages.worker import StepResult, WorkerReady
from troupellm.protocol.params.outputs import CachedTokens

DISK = "disk"
"""Name of the tier that is this engine's own; the others are shared with other engines."""

RESET_SECONDS = 1.0
"""How often a tier is asked to reset that could not, though it works."""
MOST_ROUNDS = 8
"""A sequence whose prefix is longer than host memory asks again so often, and computes the rest."""


class Offload:
    """Leads sequences into and out of LOADING; implements `tiers.Tiers`."""

    def __init__(
        self,
        config: OffloadConfig,
        ready: WorkerReady,
        tables: BlockTables,
        running_set: RunningSet,
        waiting_queue: WaitingQueue,
        per_token: Callable[[], float],
        events: BlockEvents | None = None,
    ) -> None:
        """
        Args:
            ready: says how many places host memory has, at least one.
            per_token: seconds that a token of a prompt takes to compute; 0 is unknown.
            events: hears what can be found in host memory.
        """
        self._events = events
        self._unloaded: list[tuple[Sequence, KVLoadFailed]] = []
        self._config = config
        self._ready = ready
        self._tables = tables
        self._running_set = running_set
        self._waiting = waiting_queue
        self._transfers = Transfers()
        self._counts = Counts(tuple(group.block_bytes for group in ready.groups), ready.tiers)
        self.cost = Cost(config.preemption_mode, ready.block_size, len(ready.groups), per_token)
        self._resets = Resets(self._transfers, self._choose_tiers)
        self._reset_again = 0.0
        self._stood_still = False
        self._evicted_before = 0
        self._prefetched: Counter[str] = Counter()
        self._furnish(ready)

    def _furnish(self, ready: WorkerReady) -> None:
        """Empty tiers, for a worker that has just loaded."""
        config = self._config
        self._ready = ready
        self._host = HostTier(make_policy(config.kv_offload_policy, ready.host_slots), self._events)
        threshold, timeout = config.kv_offload_store_threshold, config.kv_offload_timeout
        context = OffloadContext(self._host, self._transfers, self._tables, self.cost, self._counts)
        self._stores = Stores(context, threshold)
        self._loads = Loads(context, timeout, self._load_ended)
        self._fetches = Fetches(context, timeout, self._fetch_ended, self._missed)
        self.prefetches = Prefetches(context, self._fetches.paying, self._prefetched)
        self._choose_tiers()

    # Called by the planner.

    @property
    def busy(self) -> bool:
        """The worker has something to answer, or to hear."""
        return self._transfers.busy or self._stores.waits or self.prefetches.busy or bool(self._running_set.loading)

    @property
    def pending(self) -> bool:
        """Something is under way, or waits to go outward."""
        return self._transfers.busy or self._stores.waits or self._stores.num_waiting > 0

    def pump(self, now: float) -> None:
        """Before a plan: begin what waits for credits, and give up what takes too long."""
        self._counts.now = now
        if self._stood_still:
            self._stood_still = False
            self._loads.renew(now)
            self._fetches.renew()
        if self._running_set.loading:
            self._loads.pump(now)
            self._fetches.pump(now)
        self.prefetches.pump()
        self._stores.pump()

    def take(self) -> tuple[tuple[BlockTransfer, ...], tuple[TierLookup, ...], tuple[int, ...]]:
        """The transfers, look-ups and cancellations that the next plan must name."""
        self._stores.begin_saves()
        return self._transfers.take()

    def asks_first(self, sequence: Sequence) -> bool:
        """Whether outer tiers may have more of a sequence than is nearer; then it goes there before it is admitted."""
        tiers = sequence.tiers
        if tiers.asked or sequence.request.shared_prompt is not None:
            return False
        if not (self._fetches.inward and self.reads(sequence) and self._beyond(sequence)[0]):
            return False
        tiers.asked = not self._fetches.paying()  # computing is quicker than asking, this time
        if tiers.asked:
            self._fetches_not_done()
        return not tiers.asked

    @property
    def may_ask(self) -> bool:
        """Whether there is room for one more who waits; else an answer comes soon."""
        return not self._fetches.full

    def ask(self, sequence: Sequence) -> None:
        """From the waiting queue to those who wait for outer tiers, without blocks."""
        keys, first = self._beyond(sequence)
        self._fetches_not_done()
        missing = len(sequence.tokens) - first * self._tables.block_size
        self._waiting.go_out(sequence, 0 if sequence.paid else missing)
        sequence.handle(Event.LOAD)
        sequence.tiers.asked = True
        self._running_set.loading[sequence.row] = sequence
        self._fetches.begin(sequence, keys, first)

    def admitted(self, sequence: Sequence, *, started: bool) -> CachedTokens:
        """Begin the loads of a sequence that was just given blocks, if it has any; where its cached tokens come from.

        Args:
            started: its request had not been scheduled before.
        """
        if not self.cost.load_pays():
            self.cost.not_done("load")
        tiers, size, start = sequence.tiers, self._tables.block_size, sequence.num_computed
        origins: dict[int, int] = {}
        for hit in tiers.host_hits:
            block = self._host.find(hit.key)
            origins[hit.nth] = max(origins.get(hit.nth, 0), 0 if block is None else block.origin)
        first = first_seen(sequence.tables) if origins else 0
        if first in origins:  # blocks that no group looks at are where the window behind them is
            origins.update(dict.fromkeys(range(first), origins[first]))
        self._stores.use(sequence.keys[1 : len(sequence.tokens) // size + 1])
        self._host.touch([hit.key for hit in reversed(tiers.host_hits)])
        found = {"host": 0, "disk": 0, "external": 0}
        for origin in origins.values():
            found[self._kind(origin)] += size
        if self._counts_queries(sequence):
            behind = 0 if tiers.asks_again else len(sequence.tokens) - start  # what is asked for again counts then
            self._counts.queried_tokens += max(0, behind + size * len(origins))
            self._counts.hit_tokens += size * len(origins)
            self._counts.looked_up(0, len(sequence.tokens) // size - start // size + len(origins), len(origins))
        if tiers.host_hits:
            self._loads.begin(sequence, self._counts.now, started=started)
        before = tiers.brought
        for kind, tokens in before.items():
            found[kind] += min(tokens, start - sum(found.values()))
        tiers.brought = found if tiers.asks_again else {}
        return CachedTokens(device=start - sum(found.values()), **found)

    # Called by the block tables and the residents: `tiers.Tiers`.

    def in_host(self, key: bytes) -> object | None:
        return self._host.find(key)

    def reads(self, sequence: Sequence) -> bool:
        if sequence.is_beam or sequence.tiers.gave_up or not sequence.reads_prefix_cache:
            return False
        if sequence.was_preempted and self.cost.mode == "recompute":
            return False
        return self.cost.load_pays()

    def offer(self, sequence: Sequence) -> None:
        self._stores.offer(sequence)

    def preempted(self, sequence: Sequence) -> None:
        if self.cost.offload_pays():
            self._stores.offer(sequence, last=True, all_of_it=True)
        elif self.cost.mode == "auto":
            self.cost.not_done("store", "load")

    def ended(self, sequence: Sequence) -> None:
        self._stores.offer(sequence, last=True)
        self._stores.settle(sequence)

    def keep(self, sequence: Sequence) -> None:
        """The sequence's blocks are leased: all of them are stored, of however little use they were so far."""
        if self._config.kv_offload_store_threshold:
            sequence.tiers.num_offered = 0
        self._stores.offer(sequence, last=True, all_of_it=True)

    def save(self, group: int, block: int, key: bytes) -> None:
        """A leased block is given away with the next plan."""
        self._stores.save(group, block, key)

    def holders(self) -> list[list[list[int]]]:
        return self.prefetches.holders()

    def stop_waiting(self, sequence: Sequence) -> set[int]:
        if isinstance(sequence.tiers.loading, Ask):
            self._fetches.drop(sequence)
            return set()
        return self._loads.drop(sequence) if isinstance(sequence.tiers.loading, Loading) else set()

    # Called by the core.

    def update(self, result: StepResult, now: float) -> None:
        """Take in what a result says of transfers and tiers."""
        self._counts.now = now
        if result.tiers:
            self._counts.report(result.tiers)
            self._choose_tiers()
        if result.transfers or result.found:
            self._transfers.take_in(result.transfers, result.found)
        if self._resets.owed and (result.tiers or now >= self._reset_again):
            self._reset_again = now + RESET_SECONDS
            self._resets.retry(lambda tier: not self._counts.disabled(tier))

    def stood_still(self) -> None:
        """Nothing was planned for a while, so the worker could tell of nothing: that time counts against no tier."""
        self._stood_still = True

    def fail_unloaded(self, end: Callable[[Request, KVLoadFailed], None]) -> None:
        """End the requests whose blocks did not come, where the connector's policy says so. After `update`."""
        unloaded, self._unloaded = self._unloaded, []
        for sequence, error in unloaded:
            if not sequence.ended:
                end(sequence.request, error)

    def reset(self, done: Callable[[bool], None], *, external: bool = False) -> None:
        """Nothing that is in a tier now is found by a request that comes later, nor by another life of the engine.

        Args:
            done: hears whether outer tiers have forgotten theirs; one that could not is not used before it has.
            external: also tiers that other engines put blocks into.
        """
        self._host.reset()
        self._stores.forget()
        tiers = [number for number, tier in enumerate(self._ready.tiers, 1) if external or tier.name == DISK]
        self._resets.begin(tiers, done)

    def answer_resets(self, ok: bool) -> None:
        """Answer all waiting resets: the worker is told of nothing for now. A reset of a disabled tier is not ok."""
        self._resets.answer(ok and not any(self._counts.disabled(tier) for tier in self._resets.tiers))

    def forget(self, *, keep_host: bool = False) -> None:
        """The worker's memory is gone, and so are all transfers under way.

        Args:
            keep_host: keep the contents of host memory, except places that were being written.
        """
        self._transfers.forget()
        self._resets.forget()
        self._loads.forget()
        self._fetches.forget()
        self.prefetches.forget()
        self._stores.forget()
        if keep_host:
            self._host.end_transfers()
        else:
            self._evicted_before += self._host.num_evicted
            self._furnish(self._ready)
        self.prefetches.away = True

    def renew(self, ready: WorkerReady) -> None:
        """There is a worker again. Its host memory may have another size, and holds nothing then."""
        self._counts.renew(ready.tiers)
        if ready.host_slots != self._host.num_places:
            self._furnish(ready)
        self._ready = ready
        self.prefetches.away = False
        self._resets.retry(lambda tier: True)
        self._choose_tiers()

    def snapshot(self) -> OffloadSnapshot:
        host, counts = self._host, self._counts
        return OffloadSnapshot(
            tiers=counts.snapshot(host.num_used, host.num_places, self._evicted_before + host.num_evicted),
            loading=len(self._running_set.loading),
            transfers=self._transfers.num_transfers,
            lookups=self._transfers.num_lookups,
            waiting_spills=self._stores.num_waiting,
            queried_tokens=counts.queried_tokens,
            hit_tokens=counts.hit_tokens,
            filtered=counts.num_filtered,
            timeouts=counts.num_timeouts,
            late=self._transfers.num_late,
        )

    def assert_invariants(self) -> None:
        self._transfers.assert_invariants()
        waiting = [sequence.tiers.loading for sequence in self._running_set.loading.values()]
        not_begun = sum(len(loading.waiting) for loading in waiting if isinstance(loading, Loading))
        assert all(loading is not None for loading in waiting), "a sequence waits for nothing"
        self._host.assert_invariants(self._transfers.num_transfers - len(self._resets) + not_begun)
        asking = [loading for loading in waiting if isinstance(loading, Ask)]
        assert len(asking) == len(self._fetches) == self._waiting.num_away, "asks and waits disagree"

    def _fetches_not_done(self) -> None:
        paying = self._fetches.paying()
        self.cost.not_done(*[fetch_from(tier) for tier in self._fetches.inward if tier not in paying])

    def _load_ended(self, sequence: Sequence, loading: Loading) -> None:
        """No transfer into its blocks is under way any more, or the sequence does not wait for them."""
        again = sequence.tiers.asks_again and not loading.failed and sequence.tiers.rounds < MOST_ROUNDS
        sequence.tiers.asks_again = False
        if again:
            sequence.tiers.asked = False
            sequence.tiers.rounds += 1
        if not loading.failed and not again:
            self._loads.drop(sequence)
            del self._running_set.loading[sequence.row]
            self._running_set.run(sequence)
            if sequence.request.paused:
                self._running_set.pause(sequence)
            return
        if loading.started:
            sequence.request.scheduled = None
        self._running_set.put_back(sequence)

    def _fetch_ended(self, sequence: Sequence) -> None:
        self._running_set.put_back(sequence)

    def _missed(self, sequence: Sequence, tier: int) -> None:
        connector = self._ready.tiers[tier - 1]
        if connector.failure_policy == "fail":
            text = f"KV blocks of this request could not be loaded through the connector {connector.name}"
            self._unloaded.append((sequence, KVLoadFailed(text)))

    def _beyond(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Keys of the sequence's blocks behind those that the device and host memory have, and how many these are."""
        found = len(self._tables.find_prefix(sequence)[0])
        longest = self._tables.useful_blocks(sequence)
        return sequence.keys[found + 1 : longest + 1], found

    def _choose_tiers(self) -> None:
        """Those that work."""
        working = [
            (number, tier)
            for number, tier in enumerate(self._ready.tiers, 1)
            if not self._counts.disabled(number) and number not in self._resets.owed
        ]
        self._fetches.inward = tuple(number for number, tier in working if tier.loads)
        self._fetches.strict = frozenset(number for number, tier in working if tier.failure_policy == "fail")
        self._stores.outward = tuple(number for number, tier in working if tier.stores)

    def _kind(self, origin: int) -> str:
        if not origin:
            return "host"
        return DISK if self._ready.tiers[origin - 1].name == DISK else "external"

    def _counts_queries(self, sequence: Sequence) -> bool:
        return self._tables.caching and self.reads(sequence)


def make_offload(
    config: OffloadConfig | None,
    ready: WorkerReady,
    tables: BlockTables,
    running_set: RunningSet,
    waiting_queue: WaitingQueue,
    per_token: Callable[[], float],
    kv_events: KVEventLog | None = None,
) -> Offload | None:
    """None where the worker has no host memory for blocks, or blocks have no names."""
    if not ready.host_slots or not tables.caching:
        return None
    events = None if kv_events is None else kv_events.of("host")
    return Offload(config or OffloadConfig(), ready, tables, running_set, waiting_queue, per_token, events)
