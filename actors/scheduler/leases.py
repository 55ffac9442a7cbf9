"""Carries out clients' hints about the KV cache: leases for prefixes, and sessions that are kept, fetched and dropped.

A request's leases begin when it ends: until then its blocks are in use and cannot be evicted.
"""

from collections import Counter
from functools import partial

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.kv_cache.prefix_search import find_prefix
from troupellm.actors.scheduler.kv_offload import Offload
from troupellm.actors.scheduler.kv_sessions import Keys, KVSessions
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.config.kv_hints import (
    DropSession,
    KeepTurn,
    KVHintMessage,
    LeaseConfig,
    PrefetchReport,
    PrefetchSession,
)
from troupellm.protocol.messages.snapshot import LeaseSnapshot

_KEYS_PER_BLOCK = 4
"""Sessions name so many blocks per block of the device and its host memory."""

_OFF = LeaseSnapshot()


class Leases:
    def __init__(self, config: LeaseConfig, tables: BlockTables, offload: Offload | None, host_slots: int) -> None:
        self._config = config
        self._tables = tables
        self._offload = offload
        self._sessions = KVSessions(_KEYS_PER_BLOCK * (tables.num_blocks + host_slots))
        leased = tables.pool.leased
        leased.fraction = config.kv_lease_fraction if tables.caching else 0.0
        leased.begin(tables.num_blocks)
        self._on = leased.budget > 0
        self._prefetched: Counter[str] = Counter()
        if self._on and offload is not None:
            leased.on_given_away = self._give_away

    def advance(self, now: float) -> None:
        """The time is `now`: leases that have run out end."""
        self._tables.pool.leased.now = now
        self._tables.pool.end_expired()

    def ended(self, sequence: Sequence) -> None:
        """A sequence is about to give up its blocks for good."""
        request = sequence.request
        if not self._on or not (request.leases or request.session) or not self._tables.may_cache(sequence):
            return
        self._tables.cache_blocks(sequence)
        keys = self._tables.extend_keys(sequence, sequence.num_cached_blocks)[: sequence.num_cached_blocks + 1]
        if request.leases and self._offload is not None:
            self._offload.keep(sequence)
        for lease in request.leases:
            self._lease(request.lease_owner, keys[1 : lease.tokens // self._tables.block_size + 1], lease.seconds)
        if request.session and len(keys) > 1:
            self._sessions.add(request.lease_owner, request.session, request.number, keys)

    def handle(self, message: KVHintMessage) -> None:
        match message:
            case KeepTurn(tenant=tenant, session=session):
                turns = self._sessions.turns(tenant, session)
                if turns:
                    self._lease(tenant, next(reversed(turns.values()))[1:], self._config.tool_lease)
            case PrefetchSession(tenant=tenant, session=session, done=done):
                done(self._prefetch(tenant, session))
            case DropSession(tenant=tenant, session=session, done=done):
                done(self._drop(tenant, session))

    def snapshot(self) -> LeaseSnapshot:
        if not self._on:
            return _OFF
        leased = self._tables.pool.leased
        counts = self._prefetched if self._offload is None else self._prefetched + self._offload.prefetches.outcomes
        return LeaseSnapshot(
            leased_blocks=len(leased),
            budget=leased.budget,
            sessions=len(self._sessions),
            ends=dict(leased.ends),
            clipped=leased.num_clipped,
            forgotten_sessions=self._sessions.num_forgotten,
            prefetched=dict(counts),
        )

    def assert_invariants(self) -> None:
        self._sessions.assert_invariants()

    def _lease(self, owner: str, keys: Keys, seconds: float) -> None:
        """Lease what the token behind a prefix sees of it.

        Args:
            keys: of its blocks.
        """
        if not keys or seconds <= 0:
            return
        size, pool = self._tables.block_size, self._tables.pool
        for group, window in enumerate(self._tables.windows):
            first = 0 if window is None else max(0, len(keys) * size + 1 - window) // size
            pool.lease(owner, pool.find_all(keys[first:], group), seconds)

    def _prefetch(self, tenant: str, session: str) -> PrefetchReport | None:
        turns = self._sessions.turns(tenant, session)
        if turns is None:
            return None
        reports = [self._prefetch_turn(tenant, request, keys) for request, keys in turns.items()]
        sums = {name: sum(getattr(one, name) for one in reports) for name in PrefetchReport.__struct_fields__}
        return PrefetchReport(**sums)

    def _prefetch_turn(self, tenant: str, request: int, keys: Keys) -> PrefetchReport:
        lease = partial(self._lease, tenant, keys[1:], self._config.tool_lease)
        if self._offload is not None:
            return self._offload.prefetches.begin((tenant, request), keys, lease)
        present = len(find_prefix(self._tables.pool, keys[1:], self._tables.windows, self._tables.block_size)[0])
        report = PrefetchReport(present=present, missing=len(keys) - 1 - present)
        self._prefetched.update(present=report.present, missing=report.missing)
        lease()
        return report

    def _drop(self, tenant: str, session: str) -> int | None:
        own = self._sessions.drop(tenant, session)
        if own is None:
            return None
        pool = self._tables.pool
        found = [[pool.find(key, group) for key in keys] for keys in own for group in range(len(self._tables.windows))]
        return sum(pool.evict_first([block for block in blocks if block is not None]) for blocks in found)

    def _give_away(self, block: int) -> None:
        assert self._offload is not None
        pool = self._tables.pool
        key = pool.key_of(block)
        if key is not None:
            self._offload.save(pool.group_of(block), block, key)
