"""Which replica is chosen: by what it holds, by its work, in turns."""

from random import Random

import pytest

from troupellm.actors.replicas.chooser import DECODE_COST, EXPECTED_TOKENS, Chooser, Place, cost_of

BLOCK = 16


def keys(name: str, count: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(count)]


def places(number: int = 3, num_blocks: int = 100) -> list[Place]:
    return [Place(each, BLOCK, num_blocks) for each in range(number)]


def sent(chooser: Chooser, among: list[Place], prompt: list[bytes], most: int = 64) -> Place:
    """Choose, and give the request to the replica."""
    tokens = BLOCK * len(prompt)
    found = chooser.choose(among, prompt, tokens)
    found.work += cost_of(tokens - found.held_tokens(prompt), most, 1)
    found.rows += 1
    found.hold(prompt)
    return found


def test_a_conversation_goes_back_to_the_replica_that_holds_it() -> None:
    chooser, among = Chooser("kv"), places()
    first = sent(chooser, among, keys("a", 20))
    first.work = first.rows = 0  # its answer has ended
    for other in "bcd":
        sent(chooser, among, keys(other, 1), most=1).work = 0
    assert chooser.choose(among, [*keys("a", 20), b"more"], 21 * BLOCK) is first


def test_a_held_prefix_saves_no_more_than_it_is_worth() -> None:
    chooser, among = Chooser("kv"), places(2)
    among[0].hold(keys("hot", 10))
    among[0].work = 10 * BLOCK - 1
    assert chooser.choose(among, keys("hot", 10), 10 * BLOCK) is among[0]
    among[0].work += 2
    assert chooser.choose(among, keys("hot", 10), 10 * BLOCK) is among[1]


def test_a_hot_prefix_spreads_over_all_replicas() -> None:
    chooser, among = Chooser("kv"), places(4)
    hot = keys("hot", 40)
    counts = [0] * 4
    for _ in range(200):
        counts[sent(chooser, among, hot).number] += 1
    assert max(counts) <= 1.5 * sum(counts) / 4
    assert min(counts) > 0


def test_equal_replicas_take_turns() -> None:
    for policy in ("least", "kv", "round-robin"):
        chooser, among = Chooser(policy), places(3)  # type: ignore[arg-type]
        order = [chooser.choose(among, [], 100).number for _ in range(6)]
        assert order == [0, 1, 2, 0, 1, 2], policy


def test_least_takes_the_replica_with_the_least_work_whatever_it_holds() -> None:
    chooser, among = Chooser("least"), places(2)
    assert not chooser.reads_prefixes
    among[0].hold(keys("a", 50))
    among[0].work = 1
    assert chooser.choose(among, [], 50 * BLOCK) is among[1]


def test_the_oldest_blocks_are_forgotten_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    place = places(1, num_blocks=6)[0]
    place.hold(keys("a", 4))
    place.hold(keys("b", 4))
    assert len(place) == 6
    assert place.held_tokens(keys("b", 4)) == 4 * BLOCK
    assert place.held_tokens(keys("a", 4)) == 2 * BLOCK


@pytest.mark.parametrize("seed", range(20))
def test_no_more_blocks_are_known_than_a_cache_has(seed: int) -> None:
    rng, place = Random(seed), places(1, num_blocks=32)[0]
    for _ in range(200):
        prompt = keys(f"p{rng.randrange(30)}-", rng.randrange(1, 40))
        place.hold(prompt)
        assert len(place) <= 32
        assert place.held_tokens(prompt) == BLOCK * min(len(prompt), 32)


def test_an_answer_costs_as_much_as_may_be_expected_of_it() -> None:
    assert cost_of(100, 0, 1) == 100
    assert cost_of(100, 10, 2) == 100 + 20 * DECODE_COST
    assert cost_of(0, None, 1) == cost_of(0, 100_000, 1) == EXPECTED_TOKENS * DECODE_COST
