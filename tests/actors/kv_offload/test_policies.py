"""Which key leaves first."""

import pytest

from troupellm.actors.kv_offload import eviction as policies
from troupellm.actors.kv_offload.arc import ArcPolicy
from troupellm.actors.kv_offload.eviction import EvictionPolicy, TierFull, make_policy
from troupellm.actors.kv_offload.lru import LruPolicy
from troupellm.load_tests.kv_cache.replay import replay
from troupellm.protocol.errors import ConfigError


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def free(_: bytes) -> bool:
    return False


def filled(kind: type[EvictionPolicy], numbers: range, capacity: int) -> EvictionPolicy:
    made = kind(capacity)
    for number in numbers:
        made.admit(key(number), free)
    return made


@pytest.mark.parametrize("kind", [LruPolicy, ArcPolicy])
def test_what_was_used_last_stays(kind: type[EvictionPolicy]) -> None:
    made = filled(kind, range(4), 4)
    made.touch(key(0))
    assert made.admit(key(9), free) == key(1)
    made.refresh(key(2))
    assert made.admit(key(10), free) == key(3)
    assert len(made) == 4


@pytest.mark.parametrize("kind", [LruPolicy, ArcPolicy])
def test_pinned_keys_are_passed_over_and_a_full_tier_changes_nothing(kind: type[EvictionPolicy]) -> None:
    made = filled(kind, range(3), 3)
    assert made.admit(key(5), lambda name: name == key(0)) == key(1)
    with pytest.raises(TierFull):
        made.admit(key(6), lambda name: True)
    assert key(6) not in made
    assert [number for number in range(7) if key(number) in made] == [0, 2, 5]
    made.remove(key(2))
    assert made.admit(key(7), lambda name: True) is None


def test_arc_learns_from_ghosts_and_keeps_what_is_frequent_through_a_scan() -> None:
    made = ArcPolicy(4)
    for number in (0, 1):
        made.admit(key(number), free)
        made.touch(key(number))
    for number in range(100, 140):
        made.admit(key(number), free)
    assert key(0) in made
    assert key(1) in made
    assert len(made) == 4
    assert made.num_ghosts <= 4


def test_a_key_that_returns_from_the_ghosts_is_frequent() -> None:
    made = ArcPolicy(3)
    made.admit(key(0), free)
    made.touch(key(0))  # frequent
    made.admit(key(1), free)
    made.admit(key(5), free)
    assert made.admit(key(2), free) == key(1)  # it gives way, and is remembered
    assert made.admit(key(1), free) == key(5), "there should be more room for what is recent"
    assert made.admit(key(3), free) == key(0), "the frequent one that was used last is the one that came back"
    assert key(1) in made


def test_arc_stays_within_its_bounds_on_any_trace() -> None:
    made = ArcPolicy(8)
    state = 1
    for step in range(4000):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        name = key(state >> 8 & 31)
        if name in made:
            (made.touch if step % 3 else made.refresh)(name)
            if step % 17 == 0:
                made.remove(name)
        else:
            made.admit(name, lambda other: other[-1] % 5 == 0)
        assert len(made) <= 8
        assert len(made) + made.num_ghosts <= 16


def test_arc_beats_lru_where_scans_pollute_and_is_level_where_they_do_not() -> None:
    scan = replay("scan", accesses=6000, capacity=256)
    assert scan["lru"] < scan["arc"] <= scan["optimum"]
    assert scan["arc"] > 1.2 * scan["lru"]
    recency = replay("recency", accesses=6000, capacity=256)
    assert recency["arc"] >= 0.98 * recency["lru"]
    assert max(recency["arc"], recency["lru"]) <= recency["optimum"]


def test_policies_are_made_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_policy("lru", 3), LruPolicy)
    assert isinstance(make_policy("arc", 3), ArcPolicy)
    with pytest.raises(ConfigError, match="there is no fifo; there are arc, lru"):
        make_policy("fifo", 3)

    class Point:
        name = "fifo"

        def __init__(self, kind: type) -> None:
            self.load = lambda: kind

    monkeypatch.setattr(policies, "entry_points", lambda group: [Point(LruPolicy)] if "kv_offload" in group else [])
    assert isinstance(make_policy("fifo", 5), LruPolicy)
    monkeypatch.setattr(policies, "entry_points", lambda group: [Point(dict)])
    with pytest.raises(ConfigError, match="no EvictionPolicy"):
        make_policy("fifo", ())
