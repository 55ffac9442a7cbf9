"""Carries out clients' hints about the KV cache: leases for prefixes, and sessions that are kept, fetched and dropped.

A request's leases begin when it ends: until then its blocks are in use and cannot be evicted.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from functools import partial

import msgspec

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.kv_cache.prefix_search import find_prefix
from troupellm.actors.scheduler.kv_offload import Offload
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
MOST_SESSIONS = 1024
"""Of one tenant; the one that was used the longest ago is forgotten for another."""
MOST_TURNS = 4
"""Of one session that do not continue each other, such as those of subagents."""

Keys = list[bytes]
"""The root of the key chain, then a key per full block."""


class KVSessions:
    def __init__(self, most_keys: int) -> None:
        """most_keys: of all sessions together."""
        self._most_keys = most_keys
        self._num_keys: Counter[str] = Counter()
        """By tenant."""
        self._sessions: dict[str, OrderedDict[str, dict[int, Keys]]] = {}
        """By tenant and session, by request; what was used last stands last."""
        self.num_forgotten = 0

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))

    def turns(self, tenant: str, session: str) -> dict[int, Keys] | None:
        """By request, the newest last; None: there is no such session."""
        return self._sessions[tenant].get(session) if tenant in self._sessions else None

    def add(self, tenant: str, session: str, request: int, keys: Keys) -> None:
        """A turn of a session has ended. It takes the place of turns that it continues."""
        sessions = self._sessions.setdefault(tenant, OrderedDict())
        turns = sessions.setdefault(session, {})
        sessions.move_to_end(session)
        for number, older in list(turns.items()):
            if number == request or (len(older) <= len(keys) and older[-1] == keys[len(older) - 1]):
                self._num_keys[tenant] -= len(turns.pop(number))
        turns[request] = keys
        self._num_keys[tenant] += len(keys)
        while len(turns) > MOST_TURNS:
            self._num_keys[tenant] -= len(turns.pop(next(iter(turns))))
        while len(sessions) > MOST_SESSIONS:
            self._forget_oldest(tenant)
        while self._num_keys.total() > self._most_keys and len(self) > 1:
            self._forget_oldest(max(self._num_keys, key=self._num_keys.__getitem__))

    def drop(self, tenant: str, session: str) -> list[Keys] | None:
        """Forget a session; per turn the keys of the blocks that no other session of the tenant has.

        A key names all blocks before it too, so none that another session has follows one that it has not.

        Returns:
            None: there is no such session.
        """
        sessions = self._sessions.get(tenant, OrderedDict())
        turns = sessions.pop(session, None)
        if turns is None:
            return None
        self._left(tenant, turns)
        others = {key for other in sessions.values() for keys in other.values() for key in keys}
        return [keys[bisect_left(keys, True, lo=1, key=lambda key: key not in others) :] for keys in turns.values()]

    def _forget_oldest(self, tenant: str) -> None:
        sessions = self._sessions[tenant]
        _, turns = sessions.popitem(last=False)
        self._left(tenant, turns)
        self.num_forgotten += 1

    def _left(self, tenant: str, turns: dict[int, Keys]) -> None:
        """A session with these turns was taken out."""
        self._num_keys[tenant] -= sum(map(len, turns.values()))
        if not self._sessions[tenant]:
            del self._sessions[tenant], self._num_keys[tenant]

    def assert_invariants(self) -> None:
        counted = {
            tenant: sum(len(keys) for turns in sessions.values() for keys in turns.values())
            for tenant, sessions in self._sessions.items()
        }
        assert self._num_keys == counted, "keys of sessions are counted wrongly"
        assert all(len(sessions) <= MOST_SESSIONS for sessions in self._sessions.values()), "too many sessions"


class Leases:
    def __init__(self, config: LeaseConfig, tables: BlockTables, offload: Offload | None, host_slots: int) -> None:
        self._config = config
        self._tables = tables
        self._offload = offload
        self._sessions = KVSessions(_KEYS_PER_BLOCK * (tables.num_blocks + host_slots))
        leased = tables.pool.leased
        leased.fraction = config.kv_lease_fraction if tables.caching else 0.0
        leased.begin(tables.num_blocks)
        if tables.states is not None:
            slots = tables.states.slots
            slots.leased.fraction = leased.fraction
            slots.leased.begin(slots.num_slots)
        self._on = leased.budget > 0
        self._prefetched: Counter[str] = Counter()
        if self._on and offload is not None:
            leased.on_given_away = self._give_away

    def ended(self, sequence: Sequence) -> None:
        """A sequence whose request has leases or a session is about to give up its blocks for good."""
        request = sequence.request
        if not self._on or not self._tables.may_cache(sequence):
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
        if self._tables.states is not None:
            snapshots = self._tables.states.lease(owner, keys, seconds)
            for group in range(len(self._tables.windows)):
                begun = [(pool.find_beginning(key, tail, group), len(tail) // 4) for key, tail in snapshots if tail]
                blocks = [found[0] for found, count in begun if found is not None and found[1] == count]
                pool.lease(owner, list(dict.fromkeys(blocks)), seconds)

    def _prefetch(self, tenant: str, session: str) -> PrefetchReport | None:
        turns = self._sessions.turns(tenant, session)
        if turns is None:
            return None
        reports = [self._prefetch_turn(tenant, request, keys) for request, keys in turns.items()]
        sums = {name: sum(getattr(one, name) for one in reports) for name in PrefetchReport.__struct_fields__}
        return PrefetchReport(**sums)

    def _prefetch_turn(self, tenant: str, request: int, keys: Keys) -> PrefetchReport:
        lease = partial(self._lease, tenant, keys[1:], self._config.tool_lease)
        wanted = len(keys) - 1
        if self._tables.states is not None:
            keys = keys[: 1 + self._tables.states.reach(keys[1:])]
        if self._offload is not None:
            report = self._offload.prefetches.begin((tenant, request), keys, lease)
            return msgspec.structs.replace(report, missing=report.missing + wanted + 1 - len(keys))
        present = len(find_prefix(self._tables.pool, keys[1:], self._tables.windows, self._tables.block_size)[0])
        report = PrefetchReport(present=present, missing=wanted - present)
        self._prefetched.update(present=report.present, missing=report.missing)
        lease()
        return report

    def _drop(self, tenant: str, session: str) -> int | None:
        own = self._sessions.drop(tenant, session)
        if own is None:
            return None
        pool, states = self._tables.pool, self._tables.states
        if states is not None:
            for keys in own:
                for key in keys:
                    states.slots.end_leases(key)
        found = [[pool.find(key, group) for key in keys] for keys in own for group in range(len(self._tables.windows))]
        return sum(pool.evict_first([block for block in blocks if block is not None]) for blocks in found)

    def _give_away(self, block: int) -> None:
        assert self._offload is not None
        pool = self._tables.pool
        key = pool.key_of(block)
        if key is not None:
            self._offload.save(pool.group_of(block), block, key)
