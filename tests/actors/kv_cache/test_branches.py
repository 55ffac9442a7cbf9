"""Blocks that follow a prefix, against a plain list of them."""

from array import array

import pytest
from hypothesis import given, settings, strategies as st

from troupellm.actors.kv_cache.partial_blocks import Branches, common_tokens

BLOCKS = 8


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def common(one: list[int], two: list[int]) -> int:
    count = 0
    while count < min(len(one), len(two)) and one[count] == two[count]:
        count += 1
    return count


tokens = st.lists(st.sampled_from([0, 1, 255, 256, 65536, 2**31 - 1]), min_size=1, max_size=4)
parents = st.sampled_from([b"p", b"q"])


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(one=tokens, two=tokens)
def test_common_tokens_are_counted_from_the_beginning(one: list[int], two: list[int]) -> None:
    assert common_tokens(packed(one), packed(two)) == common(one, two)
    assert common_tokens(packed(one), b"") == 0


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, BLOCKS - 1), parents, tokens), max_size=25),
    wanted=st.lists(st.tuples(parents, tokens), min_size=1, max_size=6),
)
def test_the_longest_match_is_found(
    steps: list[tuple[int, bytes, list[int]]], wanted: list[tuple[bytes, list[int]]]
) -> None:
    """Each step adds a block, or takes it out if it is in."""
    branches, plain = Branches(BLOCKS), dict[int, tuple[bytes, list[int]]]()
    for block, parent, held in steps:
        if block in plain:
            branches.remove(block)
            del plain[block]
        else:
            branches.add(parent, packed(held), block)
            plain[block] = (parent, held)
        branches.assert_invariants()
        assert {block for block in range(BLOCKS) if block in branches} == plain.keys()
    for parent, looked_for in wanted:
        most = max((common(held, looked_for) for other, held in plain.values() if other == parent), default=0)
        found = branches.longest(parent, packed(looked_for))
        if most == 0:
            assert found is None
        else:
            assert found is not None
            assert found[1] == most == common(plain[found[0]][1], looked_for)
            assert plain[found[0]][0] == parent


def test_removal_is_idempotent_and_clear_forgets_all() -> None:
    branches = Branches(3)
    for block in range(3):
        branches.add(b"p", packed([1, block]), block)
    branches.remove(1)
    branches.remove(1)
    assert branches.longest(b"p", packed([1, 2])) == (2, 2)
    branches.clear()
    branches.assert_invariants()
    assert branches.longest(b"p", packed([1, 2])) is None


@pytest.mark.parametrize("count", [2, 500])
def test_equal_tokens_of_several_blocks_are_told_apart(count: int) -> None:
    branches = Branches(count)
    for block in range(count):
        branches.add(b"p", packed([7]), block)
    for block in reversed(range(count)):
        branches.remove(block)
        branches.assert_invariants()
