"""Blocks that come back to the device before a request asks for them: first into host memory, then on.

A prefetch takes only blocks that are free or unleased, so it ends no lease and preempts no sequence. It holds its
blocks until all of them are there. The worker answers every transfer once, so the blocks always come back.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from troupellm.actors.kv_cache.block_pool import in_group
from troupellm.actors.kv_cache.prefix_search import IN_HOST, WithHost, find_prefix
from troupellm.actors.kv_offload.context import OffloadContext
from troupellm.actors.kv_offload.cost import fetch_from
from troupellm.actors.kv_offload.transfers import LOOKUPS
from troupellm.protocol.config.kv_hints import PrefetchReport
from troupellm.protocol.messages.kv_transfers import TransferDone
from troupellm.protocol.messages.worker import NULL_BLOCK

MOST_PREFETCHES = 32
"""Under way at once; more find no room, as do those that are asked for while there is no worker."""
MOST_PREFETCHES_OF_TENANT = 8
MOST_LOADS = 256
"""Blocks that one prefetch takes."""
_DEVICE_SHARE = 4
"""One prefetch takes at most a quarter of the free and unleased blocks: running work needs the others meanwhile."""
_HOST_SHARE = 2
"""One prefetch fills at most half of host memory from outer tiers."""
_RESERVE_SHARE = 100
"""One in so many blocks of the device stays for sequences to grow into."""


class _Wanted(NamedTuple):
    group: int
    nth: int
    block: int


class _Prefetch:
    """`keys`: the root of the chain, then those of the blocks."""

    __slots__ = ("age", "done", "fetches", "keys", "loads", "lookups", "pending", "report", "tables")

    def __init__(self, keys: list[bytes], age: int, done: Callable[[], None]) -> None:
        self.keys, self.age, self.done = keys, age, done
        self.lookups: dict[int, int] = {}
        """By tier, how many keys it has; -1 before its answer."""
        self.fetches: deque[tuple[int, int, bytes]] = deque()
        """(tier, group, key) of blocks that wait to be fetched."""
        self.loads: deque[_Wanted] = deque()
        self.pending = 0
        """Transfers under way."""
        self.tables: list[list[int]] = []
        """The blocks that it holds, per group."""
        self.report = PrefetchReport()


class Prefetches:
    def __init__(self, context: OffloadContext, inward: Callable[[], tuple[int, ...]], outcomes: Counter[str]) -> None:
        """
        Args:
            inward: outer tiers that bring blocks sooner than they are computed, nearest first.
            outcomes: counts blocks.
        """
        self._host, self._transfers, self._tables, self._cost, self._counts = context
        self._inward = inward
        self._jobs: dict[tuple[str, int], _Prefetch] = {}
        self.outcomes = outcomes
        self.away = False
        """There is no worker."""

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def begin(self, name: tuple[str, int], keys: list[bytes], done: Callable[[], None]) -> PrefetchReport:
        """Bring the blocks of a prefix to the device.

        Args:
            name: tenant and number of the prefix; one that is on its way is not begun again.
            keys: the root of the chain, then those of the blocks.
            done: is called when the device has as many as there is room for.
        """
        if name in self._jobs:
            return self._jobs[name].report
        of_tenant = sum(tenant == name[0] for tenant, _ in self._jobs)
        if self.away or len(self._jobs) >= MOST_PREFETCHES or of_tenant >= MOST_PREFETCHES_OF_TENANT:
            self.outcomes["no_room"] += len(keys) - 1
            return PrefetchReport(no_room=len(keys) - 1)
        job = self._jobs[name] = _Prefetch(keys, self._tables.cache_age, done)
        found = self._find(job)
        beyond, tiers = keys[1 + len(found[0]) :], self._inward()
        if beyond and tiers and self._transfers.num_lookups + len(tiers) <= LOOKUPS:
            self._ask(name, job, beyond, len(found[0]), tiers)
            present = sum(block not in (IN_HOST, NULL_BLOCK) for block in found[0])
            job.report = PrefetchReport(present=present, loading=len(keys) - 1 - present)
        else:
            self._load(job)
            self._settle(name, job)
        return job.report

    def pump(self) -> None:
        """Begin what waits for credits."""
        for name, job in list(self._jobs.items()):
            self._start(name, job)
            self._settle(name, job)

    def holders(self) -> list[list[list[int]]]:
        """Tables of blocks that are held."""
        return [job.tables for job in self._jobs.values()]

    def forget(self) -> None:
        """The worker is gone, and with it the transfers and the blocks."""
        self._jobs.clear()

    def _find(self, job: _Prefetch) -> list[list[int]]:
        known = WithHost(self._tables.pool, self._host.find)
        return find_prefix(known, job.keys[1:], self._tables.windows, self._tables.block_size)

    def _ask(
        self, name: tuple[str, int], job: _Prefetch, keys: list[bytes], first: int, tiers: tuple[int, ...]
    ) -> None:
        group = self._tables.windows.index(None) if None in self._tables.windows else 0
        named = tuple([in_group(key, group) for key in keys])
        for tier in tiers:

            def found(count: int, tier: int = tier) -> None:
                job.lookups[tier] = max(0, min(count, len(keys)))
                self._counts.looked_up(tier, len(keys), job.lookups[tier])
                if min(job.lookups.values()) >= 0:
                    self._choose(job, keys, first)
                    self._start(name, job)
                    self._settle(name, job)

            job.lookups[tier] = -1
            self._transfers.ask(tier, named, found)

    def _choose(self, job: _Prefetch, keys: list[bytes], first: int) -> None:
        """Fetch each block from the nearest tier that has it, for the groups that see it."""
        windows, size = self._tables.windows, self._tables.block_size
        count = min(max(job.lookups.values()), self._host.num_places // (_HOST_SHARE * len(windows)))
        for index in range(count):
            tier = next(tier for tier, has in job.lookups.items() if has > index)
            for group, window in enumerate(windows):
                seen = 0 if window is None else max(0, (first + count) * size + 1 - window) // size
                if first + index >= seen:
                    job.fetches.append((tier, group, in_group(keys[index], group)))

    def _start(self, name: tuple[str, int], job: _Prefetch) -> None:
        while job.fetches and self._transfers.credits("fetch", job.fetches[0][0]) > 0:
            self._fetch(name, job, *job.fetches.popleft())
        if job.lookups and not job.fetches and not job.pending and min(job.lookups.values()) >= 0:
            job.lookups.clear()
            self._load(job)
        while job.loads and self._transfers.credits("load") > 0:
            if self._tables.being_copied(job.loads[0].block):
                return  # the plan that copies from or to the block comes first
            self._begin_load(name, job, job.loads.popleft())

    def _fetch(self, name: tuple[str, int], job: _Prefetch, tier: int, group: int, key: bytes) -> None:
        target = self._host.prepare_store(key)
        if target is None:  # it is there or on its way, or there is no place
            return

        def done(answer: TransferDone) -> None:
            self._counts.moved("fetch", answer, tier)
            if answer.ok:
                self._cost.learn(fetch_from(tier), answer.seconds)
                target.origin = tier
            self._host.complete_store(target, ok=answer.ok)
            self._ended(name, job)

        job.pending += 1
        self._transfers.begin("fetch", done, place=target.place, key=key, group=group, block=NULL_BLOCK, tier=tier)

    def _load(self, job: _Prefetch) -> None:
        """Take blocks for what host memory has of the prefix, its beginning first, as far as there is room."""
        pool, found = self._tables.pool, self._find(job)
        held = [[block for block in blocks if block >= 0] for blocks in found]
        for group, blocks in enumerate(held):
            pool.share(blocks, group)
        job.tables = held
        wanted = sorted((index, g) for g, blocks in enumerate(found) for index, b in enumerate(blocks) if b == IN_HOST)
        unleased = pool.num_unleased
        room = max(0, min(unleased // _DEVICE_SHARE, MOST_LOADS, unleased - pool.num_blocks // _RESERVE_SHARE))
        for index, group in wanted[:room]:
            (block,) = pool.take(1, group)
            held[group].append(block)
            job.loads.append(_Wanted(group, index, block))
        job.report = PrefetchReport(
            present=sum(map(len, held)) - len(job.loads),
            loading=len(job.loads),
            missing=len(job.keys) - 1 - len(found[0]),
            no_room=len(wanted) - len(job.loads),
        )
        for outcome in ("present", "missing", "no_room"):
            self.outcomes[outcome] += getattr(job.report, outcome)

    def _begin_load(self, name: tuple[str, int], job: _Prefetch, wanted: _Wanted) -> None:
        group, nth, block = wanted
        chained, parent = job.keys[nth + 1], job.keys[nth]
        key = in_group(chained, group)
        source = self._host.prepare_load(key)
        if source is None:
            self.outcomes["failed"] += 1
            return

        def done(answer: TransferDone) -> None:
            self._counts.moved("load", answer)
            self._host.complete_load(source, ok=answer.ok or answer.error in ("cancelled", "busy"))
            self.outcomes["loaded" if answer.ok else "failed"] += 1
            if answer.ok:
                self._cost.learn("load", answer.seconds)
                if job.age == self._tables.cache_age:
                    self._tables.pool.cache_block(block, chained, parent)
            self._ended(name, job)

        job.pending += 1
        self._transfers.begin("load", done, place=source.place, key=key, group=group, block=block, tier=0)

    def _ended(self, name: tuple[str, int], job: _Prefetch) -> None:
        job.pending -= 1
        self._start(name, job)
        self._settle(name, job)

    def _settle(self, name: tuple[str, int], job: _Prefetch) -> None:
        """Give the blocks back to the cache once nothing is under way any more."""
        if job.pending or job.loads or job.fetches or job.lookups or self._jobs.get(name) is not job:
            return
        del self._jobs[name]
        self._tables.release(job.tables)
        job.done()
