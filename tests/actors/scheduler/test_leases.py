"""Leases of KV blocks: the order of eviction, shares of keys, sessions by name, and what they are worth to agents."""

from dataclasses import dataclass

import pytest
from oracle import SECRET, Harness, ready, stream_of, submission

from troupellm.actors.kv_cache.block_pool import BlockPool
from troupellm.actors.kv_cache.leased_blocks import LeasedBlocks
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.actors.scheduler.kv_sessions import MOST_SESSIONS, MOST_TURNS, KVSessions
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.kv_hints import DropSession, KeepTurn, LeaseConfig, PrefetchSession, PrefixLease

PROMPT = list(range(1, 10))  # two full blocks of four, and one token


def pool_with(num_blocks: int, fraction: float = 1.0) -> BlockPool:
    leased = LeasedBlocks()
    leased.fraction = fraction
    return BlockPool(num_blocks, leased=leased)


def cached(pool: BlockPool, *names: bytes) -> list[int]:
    """A sequence's blocks, named and given back."""
    blocks = pool.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.cache_block(block, name)
    pool.release(blocks)
    return blocks


def evicted(pool: BlockPool, count: int) -> list[int]:
    """The next blocks that other work gets, one after the other."""
    taken = [pool.take(1)[0] for _ in range(count)]
    pool.assert_invariants(dict.fromkeys(taken, 1))
    return taken


def test_a_leased_block_is_evicted_after_unleased_ones() -> None:
    pool = pool_with(2)
    (kept,) = cached(pool, b"kept")
    (other,) = cached(pool, b"other")
    pool.lease("key", [kept], 300.0)
    assert evicted(pool, 2) == [other, kept]
    assert pool.leased.ends["evicted"] == 1


def test_the_oldest_lease_is_evicted_first_and_of_one_prefix_the_tail() -> None:
    pool = pool_with(4)
    first = cached(pool, b"a", b"b")
    second = cached(pool, b"c", b"d")
    pool.lease("key", second, 300.0)
    pool.leased.now = 1.0
    pool.lease("key", first, 60.0)
    assert evicted(pool, 4) == [second[1], second[0], first[1], first[0]]


def test_blocks_in_use_that_are_evicted_first_follow_when_they_are_released() -> None:
    pool = pool_with(3)
    (other,) = cached(pool, b"other")
    own = pool.take(2)
    for block, name in zip(own, (b"a", b"b"), strict=True):
        pool.cache_block(block, name)
    assert pool.evict_first(own) == 2
    pool.release(own)
    assert evicted(pool, 3) == [own[1], own[0], other]


def test_an_expired_lease_is_evicted_before_live_ones_and_joins_the_unleased() -> None:
    pool = pool_with(3)
    (long,), (short,), (none,) = (cached(pool, name) for name in (b"long", b"short", b"none"))
    pool.lease("key", [long], 300.0)
    pool.lease("key", [short], 60.0)
    pool.leased.now = 61.0
    pool.end_expired()
    assert pool.leased.ends["expired"] == 1
    assert evicted(pool, 3) == [none, short, long]


def test_a_use_renews_a_lease() -> None:
    pool = pool_with(2)
    (block,) = cached(pool, b"used")
    pool.lease("key", [block], 60.0)
    pool.leased.now = 50.0
    pool.share([block])
    pool.assert_invariants({block: 1})
    pool.release([block])
    pool.leased.now = 100.0
    pool.end_expired()
    assert block in pool.leased
    pool.leased.now = 111.0
    pool.end_expired()
    assert block not in pool.leased
    pool.assert_invariants({})


def test_keys_share_the_budget_equally() -> None:
    pool = pool_with(8, fraction=0.5)
    first = cached(pool, *[b"a%d" % number for number in range(4)])
    second = cached(pool, *[b"b%d" % number for number in range(4)])
    pool.lease("one", first, 300.0)
    assert all(block in pool.leased for block in first)
    pool.lease("two", second, 300.0)
    assert [block in pool.leased for block in first] == [True, True, False, False]
    assert [block in pool.leased for block in second] == [True, True, False, False]
    assert (pool.leased.ends["share"], pool.leased.num_clipped) == (2, 2)
    pool.assert_invariants({})


def test_a_key_at_its_share_replaces_its_own_oldest_leases() -> None:
    pool = pool_with(4, fraction=0.5)
    first, second = cached(pool, b"a", b"b"), cached(pool, b"c")
    pool.lease("one", first, 300.0)
    pool.lease("one", second, 300.0)
    assert [block in pool.leased for block in (*first, *second)] == [True, False, True]
    assert pool.leased.ends["replaced"] == 1


class CountedKey(bytes):
    """A key that counts comparisons."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.num_compared += 1
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        CountedKey.num_compared += 1
        return super().__ne__(other)

    __hash__ = bytes.__hash__


class CountedKeys(list[bytes]):
    """The keys of a turn, which count how often their length is asked for."""

    num_asked = 0

    def __len__(self) -> int:
        CountedKeys.num_asked += 1
        return super().__len__()


@dataclass
class Agents:
    """A scheduler with a small cache, and requests that run one after another."""

    harness: Harness
    number: int = 0

    def turn(self, prompt: list[int], *, answer: int = 1, **hints: object) -> int:
        """Tokens of the prompt that were found."""
        self.number += 1
        self.harness.submit(submission(self.number, prompt, max_tokens=answer, **hints))
        self.harness.run()
        closed = self.harness.reader.closed[self.number]
        assert closed.error is None
        return closed.usage.cached_tokens

    def tell(self, make: object, *names: str) -> object:
        answers: list[object] = []
        self.harness.core.leases.handle(make(*names, answers.append))
        self.harness.core.assert_invariants()
        return answers[0]


def agents(num_blocks: int = 16, fraction: float = 0.5, max_model_len: int = 64, **config: object) -> Agents:
    settings = ready(num_blocks=num_blocks, max_model_len=max_model_len)
    core = SchedulerCore(
        SchedulerConfig(**({"max_plans_in_flight": 1} | config)),
        settings,
        enable_prefix_caching=True,
        hash_key=SECRET,
        leases=LeaseConfig(kv_lease_fraction=fraction, tool_lease=1000.0),
    )
    return Agents(Harness(core, settings))


def flood(made: Agents, prompts: int, length: int = 24) -> None:
    """Prompts that are never asked for again."""
    for number in range(prompts):
        made.turn([20 + number % 40, *range(1, length)], tenant="other")


@pytest.mark.parametrize(("fraction", "found"), [(0.5, 8), (0.0, 0)])
def test_a_marked_prefix_survives_a_flood(fraction: float, found: int) -> None:
    made = agents(fraction=fraction)
    made.turn(PROMPT, leases=(PrefixLease(8, 1000.0),))
    flood(made, 6)
    assert made.turn(PROMPT) == found


def test_only_the_full_blocks_before_a_mark_are_leased() -> None:
    made = agents()
    made.turn(PROMPT, leases=(PrefixLease(7, 1000.0),))
    assert made.harness.core.snapshot().leases.leased_blocks == 1


def test_a_lease_ends_by_the_schedulers_clock() -> None:
    made = agents()
    made.turn(PROMPT, leases=(PrefixLease(8, 5.0),))
    assert made.harness.core.snapshot().leases.leased_blocks == 2
    made.harness.now += 6.0
    made.harness.plan()
    shown = made.harness.core.snapshot().leases
    assert (shown.leased_blocks, shown.ends["expired"]) == (0, 2)


def test_running_work_takes_leased_blocks() -> None:
    made = agents(num_blocks=16, fraction=1.0)
    for number in range(2):
        made.turn([30 + number, *range(1, 25)], leases=(PrefixLease(24, 1e6),))
    assert made.harness.core.snapshot().leases.leased_blocks == 12
    assert made.turn(list(range(1, 50)), answer=10, tenant="other") == 0
    assert made.harness.core.snapshot().leases.ends["evicted"] > 0


def test_a_turn_that_ended_in_calls_is_kept_until_the_results_come() -> None:
    made = agents()
    made.turn(PROMPT, answer=4, session="s", tenant="one")
    made.harness.core.leases.handle(KeepTurn("one", "s"))
    flood(made, 6)
    grown = [*PROMPT, *stream_of(PROMPT, 0, 4, frozenset())]
    assert made.turn([*grown, 1, 2, 3, 4], tenant="one", session="s") == 12


def test_another_tenants_session_is_not_found() -> None:
    made = agents()
    made.turn(PROMPT, session="s", tenant="one")
    assert made.tell(DropSession, "two", "s") is None
    assert made.tell(PrefetchSession, "two", "s") is None
    made.harness.core.leases.handle(KeepTurn("two", "s"))
    assert made.harness.core.snapshot().leases.leased_blocks == 0


def test_the_own_blocks_of_a_session_that_ended_are_evicted_first() -> None:
    made = agents()
    shared, own, other = [1, 2, 3, 4], [5, 6, 7, 8, 9], [15, 16, 17, 18, 19]
    made.turn([*shared, *own], session="s", leases=(PrefixLease(8, 1000.0),))
    made.turn([*shared, *other], session="t", leases=(PrefixLease(8, 1000.0),))
    assert made.tell(DropSession, "", "s") == 1
    assert made.tell(DropSession, "", "s") is None
    made.turn(list(range(20, 63)), tenant="other")  # all blocks that are free, and one
    assert made.turn([*shared, *other]) == 8
    assert made.turn([*shared, *own]) == 4


def test_without_tiers_a_prefetch_tells_what_the_device_has() -> None:
    made = agents()
    made.turn(PROMPT, session="s")
    report = made.tell(PrefetchSession, "", "s")
    assert (report.present, report.loading, report.missing) == (2, 0, 0)
    assert made.harness.core.snapshot().leases.leased_blocks == 2


def test_a_lost_worker_ends_all_leases_and_changes_no_answer() -> None:
    made = agents()
    made.turn(PROMPT, leases=(PrefixLease(8, 1000.0),), session="s")
    made.harness.submit(submission(50, PROMPT, max_tokens=6, leases=(PrefixLease(8, 1000.0),)))
    made.harness.step()
    made.harness.lose()
    made.harness.run()
    assert made.harness.reader.streams[5000] == stream_of(PROMPT, 0, 6, frozenset())
    shown = made.harness.core.snapshot().leases
    assert (shown.ends["reset"], shown.leased_blocks) == (2, 2)


def test_a_reset_cache_has_no_leases() -> None:
    made = agents()
    made.turn(PROMPT, leases=(PrefixLease(8, 1000.0),))
    made.harness.core.reset_prefix_cache()
    made.harness.core.assert_invariants()
    assert made.harness.core.snapshot().leases.leased_blocks == 0
    assert made.turn(PROMPT) == 0


def test_sessions_are_bounded_and_the_least_recently_used_is_forgotten() -> None:
    sessions = KVSessions(10**6)
    for number in range(MOST_SESSIONS + 1):
        sessions.add("one", str(number), number, [b"root", b"%d" % number])
        sessions.add("one", "1", number, [b"root", b"1"])
    sessions.assert_invariants()
    assert len(sessions) == MOST_SESSIONS
    assert sessions.turns("one", "0") is None
    assert sessions.turns("one", "1") == {MOST_SESSIONS: [b"root", b"1"]}


def test_a_turn_replaces_the_one_that_it_continues_and_branches_stay() -> None:
    sessions = KVSessions(10**6)
    sessions.add("", "s", 1, [b"root", b"a"])
    sessions.add("", "s", 2, [b"root", b"a", b"b"])
    sessions.add("", "s", 3, [b"root", b"c"])
    assert list(sessions.turns("", "s")) == [2, 3]
    for number in range(4, 4 + MOST_TURNS):
        sessions.add("", "s", number, [b"root", b"%d" % number])
    assert list(sessions.turns("", "s")) == list(range(4, 4 + MOST_TURNS))
    sessions.assert_invariants()


def test_the_tenant_with_the_most_keys_gives_way_when_sessions_name_too_many_blocks() -> None:
    sessions = KVSessions(8)
    sessions.add("small", "s", 1, [b"root", b"a"])
    for number in range(3):
        sessions.add("large", str(number), number, [b"root", b"%d" % number, b"x"])
    assert sessions.turns("small", "s") is not None
    assert sessions.turns("large", "0") is None
    assert sessions.num_forgotten == 1
    sessions.assert_invariants()


def test_a_dropped_session_is_not_compared_with_each_other_session() -> None:
    sessions = KVSessions(10**6)
    root, first, second = CountedKey(b"root"), CountedKey(b"first"), CountedKey(b"second")
    for number in range(200):
        sessions.add("", str(number), number, [root, first, CountedKey(b"%d" % number)])
    sessions.add("", "s", 200, [root, first, second, CountedKey(b"third")])
    sessions.add("", "s", 201, [root, CountedKey(b"fourth")])
    sessions.add("", "0", 202, [root, first, second, CountedKey(b"fifth")])
    CountedKey.num_compared = 0
    assert sessions.drop("", "s") == [[b"third"], [b"fourth"]]
    assert CountedKey.num_compared < 20
    sessions.assert_invariants()


def test_a_turn_for_which_another_is_forgotten_counts_no_keys_of_the_others() -> None:
    sessions = KVSessions(400)
    for number in range(200):
        sessions.add("one", str(number), number, CountedKeys([b"root", b"%d" % number]))
    CountedKeys.num_asked = 0
    sessions.add("two", "s", 200, CountedKeys([b"root", b"s"]))
    assert (sessions.turns("one", "0"), sessions.num_forgotten) == (None, 1)
    assert CountedKeys.num_asked < 20
    sessions.assert_invariants()
