"""Chains of n-grams against a search through the whole text."""

from collections.abc import Sequence

import numpy as np
import pytest

from troupellm.models.proposers import suffix_index
from troupellm.models.proposers.suffix_index import Match, MatchIndex

SIZES = (2, 4)


def fill(index: MatchIndex, tokens: Sequence[int]) -> None:
    index.extend(np.array(tokens, np.int32))


def searched(text: list[int], size: int, depth: int, most: int, oldest: int = 0) -> Match:
    """As `MatchIndex.find` of the text's own end, by looking everywhere."""
    context, best, found = text[-depth:], size, list[int]()
    for position in range(len(text) - 2, oldest - 1, -1):
        length = 0
        while length < min(len(context), position - oldest + 1) and text[position - length] == context[-1 - length]:
            length += 1
        if length > best:
            best, found = length, []
        if length == best and len(found) < most:
            found.append(position)
        if best == len(context) and len(found) == most:
            break
    return Match(best, found) if found else suffix_index.NO_MATCH


def own(index: MatchIndex, level: int, text: list[int], depth: int, most: int) -> Match:
    return index.find(level, index.hashes[level], text[-depth:], tries=10_000, most=most)


@pytest.mark.parametrize("at_once", [1, 3, 47, 48, 130])
@pytest.mark.parametrize("words", [3, 40, 250_000])
def test_the_longest_and_most_recent_places_are_found(at_once: int, words: int) -> None:
    random = np.random.default_rng(words + at_once)
    index, text = MatchIndex(SIZES, 4096), list[int]()
    for _ in range(max(4, 120 // at_once)):
        fill(index, piece := random.integers(0, words, at_once).tolist())
        text += piece
        if random.random() < 0.5 and len(text) > 60:
            begin = int(random.integers(0, len(text) - 20))
            fill(index, again := text[begin : begin + 9])
            text += again
        for level, size in enumerate(SIZES):
            for most in (1, 3):
                if len(text) > 8:
                    assert own(index, level, text, 7, most) == searched(text, size, 7, most)


def test_one_by_one_and_all_at_once_write_the_same_chains() -> None:
    tokens = np.random.default_rng(0).integers(0, 2, 300)
    pieces, whole = MatchIndex((1, 3, 7), 512), MatchIndex((1, 3, 7), 512)
    for token in tokens:
        fill(pieces, [int(token)])
    fill(whole, tokens[:1])
    fill(whole, tokens[1:].tolist())
    assert pieces.hashes == whole.hashes
    for level in range(3):
        context = tokens[-9:].tolist()
        one = pieces.find(level, pieces.hashes[level], context, tries=500, most=400)
        assert one == whole.find(level, whole.hashes[level], context, tries=500, most=400)
        assert one.positions


def test_a_full_ring_finds_only_what_it_still_holds() -> None:
    random = np.random.default_rng(1)
    index, text = MatchIndex(SIZES, 64), list[int]()
    for size in (40, 40, 5, 200, 30, 63, 64, 65):
        fill(index, piece := random.integers(0, 3, size).tolist())
        text += piece
        assert own(index, 0, text, 5, 2) == searched(text, 2, 5, 2, oldest=max(0, len(text) - 64))


def test_a_look_up_ends_after_its_tries() -> None:
    index = MatchIndex((1,), 64)
    fill(index, [5, 7] * 10 + [5, 8] * 4 + [7, 5])
    assert index.find(0, index.hashes[0], [7, 5], tries=3, most=1).length == 1
    assert index.find(0, index.hashes[0], [7, 5], tries=4, most=1).length == 2


def test_texts_do_not_run_into_each_other_and_forgotten_ones_are_not_found() -> None:
    index = MatchIndex((2,), 64)
    fill(index, [1, 2])
    index.restart()
    fill(index, [3, 4, 2, 3, 9, 2, 3])
    found = index.find(0, index.hashes[0], [2, 3], tries=9, most=9)
    assert found == Match(2, [5])  # not 1, 2 | 3
    index.restart()
    index.forget_before(index.end)
    fill(index, [7, 2, 3])
    assert index.find(0, index.hashes[0], [2, 3], tries=9, most=9) == suffix_index.NO_MATCH


def test_the_places_of_a_match_are_followed_as_the_text_goes_on() -> None:
    random = np.random.default_rng(2)
    index, text = MatchIndex((1,), 64), random.integers(0, 3, 20).tolist()
    fill(index, text)
    left = 0
    for _ in range(100):
        match = own(index, 0, text, 6, 99)
        said = random.integers(0, 3, int(random.integers(1, 4))).tolist()
        fill(index, said)
        text += said
        count, oldest = len(said), max(0, len(text) - 64)
        places = [place + count for place in match.positions if place >= oldest]
        places = [place for place in places if text[place + 1 - count : place + 1] == said]
        wanted = Match(min(match.length + count, 8), places) if places else suffix_index.NO_MATCH
        assert index.advance(match, said, 8) == wanted
        left += bool(places)
    assert left > 5


def test_positions_begin_anew_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "LAST_POSITION", 100)
    index = MatchIndex((2,), 32)
    for _ in range(50):
        index.restart()
        index.forget_before(index.end)
        text = [1, 2, 3, 4, 1, 2]
        fill(index, text)
        assert own(index, 0, text, 2, 5) == Match(2, [index.begin + 1])
    assert index.end < 110
