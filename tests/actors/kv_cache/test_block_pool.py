"""Reference counts, eviction order, and a random walk against a plain model."""

import random

import pytest

from troupellm.actors.kv_cache.block_pool import BlockPool


def test_every_block_is_given_once_and_comes_back() -> None:
    pool = BlockPool(4)
    blocks = pool.take(4)
    assert sorted(blocks) == [0, 1, 2, 3]
    assert pool.num_available == 0
    with pytest.raises(ValueError, match="1 blocks wanted, 0 available"):
        pool.take(1)
    pool.release(blocks)
    assert pool.num_free == 4
    pool.assert_invariants({})


def test_a_labelled_block_stays_findable_after_its_owner_left() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.cache_block(block, b"key")
    pool.release([block])
    assert pool.find(b"key") == block
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.share([block])
    assert pool.num_cached == 0
    assert pool.references(block) == 1
    pool.assert_invariants({block: 1})


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for index, block in enumerate(blocks):
        pool.cache_block(block, bytes([index]))
    pool.release(blocks)
    assert pool.take(1) == [blocks[2]]
    assert pool.find(b"\x02") is None
    assert pool.take(1) == [blocks[1]]
    assert pool.find(b"\x00") == blocks[0]


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.cache_block(first, b"first")
    pool.cache_block(second, b"second")
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.take(1) == [second]


@pytest.mark.parametrize("counts", [(1, 1, 3000, 1), (5, 1500, 1500, 999), (4000, 7)])
def test_blocks_come_in_order_and_the_latest_released_one_first(counts: tuple[int, ...]) -> None:
    """Also from a pool so large that its blocks are not listed at once."""
    pool, stack = BlockPool(5000), list(range(4999, -1, -1))
    for count in counts:
        wanted = [stack.pop() for _ in range(count)]
        taken = pool.take(count)
        assert taken == wanted
        assert pool.num_free == pool.num_available == len(stack)
        back = taken[: count // 2]
        pool.release(back)
        stack += reversed(back)
        pool.assert_invariants()


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(2)
    kept, _ = pool.take(2)
    pool.cache_block(kept, b"kept")
    pool.release([kept])
    pool.release([1 - kept])
    assert pool.take(1) == [1 - kept]
    assert pool.find(b"kept") == kept


def test_equal_content_is_named_once() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.cache_block(first, b"key")
    pool.cache_block(second, b"key")
    assert pool.find(b"key") == first
    pool.release([second])
    assert pool.num_free == 1
    pool.assert_invariants({first: 1})


def test_a_release_too_many_is_an_error() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)


def test_the_invariants_notice_a_lost_owner() -> None:
    pool = BlockPool(1)
    pool.take(1)
    with pytest.raises(AssertionError, match="owners"):
        pool.assert_invariants({})


@pytest.mark.parametrize("seed", range(20))
def test_a_random_walk_keeps_the_accounts(seed: int) -> None:
    chance = random.Random(seed)
    pool = BlockPool(9)
    tables: list[list[int]] = []
    keys = 0
    for _ in range(200):
        action = chance.choice(("take", "share", "label", "release"))
        if action == "take" and pool.num_available >= (wanted := chance.randint(1, 4)):
            tables.append(pool.take(wanted))
        elif action == "share" and keys:
            block = pool.find(b"%d" % chance.randrange(keys))
            if block is not None:
                pool.share([block])
                tables.append([block])
        elif action == "label" and tables:
            pool.cache_block(chance.choice(chance.choice(tables)), b"%d" % keys)
            keys += 1
        elif action == "release" and tables:
            pool.release(tables.pop(chance.randrange(len(tables))))
        owners: dict[int, int] = {}
        for block in (block for table in tables for block in table):
            owners[block] = owners.get(block, 0) + 1
        pool.assert_invariants(owners)
