"""Which match suffix decoding drafts from: against a search through everything that was said, and beyond its bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from troupellm.models.proposers import suffix
from troupellm.models.proposers.suffix import SuffixProposer
from troupellm.tests.support.speculation.proposals import batch_of, drafted, guess, new_row

WITHOUT_BOUND = 1_000_000
FORM = list(range(900, 906))
"""The common part of every call of a tool, behind its name."""
TOOLS = 40
"""More than the places that are compared."""


@dataclass(frozen=True)
class Model:
    """Suffix decoding by looking everywhere."""

    depth: int
    factor: float
    least: float

    @property
    def reach(self) -> int:
        return max(1, int(self.depth / (1 + self.factor)))

    def drafts(self, text: list[int], past: Sequence[list[int]], limit: int) -> list[list[int]]:
        """Those that may be expected: two where the row's own text promises as much as the past.

        Args:
            past: texts that are kept of the row's tenant, oldest first.
        """
        own, own_score = self._best(text, [text], limit, _going_on)
        found, score = self._best(text, past, limit, _to_the_end)
        if abs(score - own_score) < 1e-9:
            return [own, found]
        return [found if score > own_score else own]

    def _best(
        self, text: list[int], places: Sequence[list[int]], limit: int, behind: Callable[[list[int], int], list[int]]
    ) -> tuple[list[int], float]:
        matches = [
            (self._agreement(text, place, end), place, end)
            for place in reversed(places)
            for end in range(len(place) - (place is text), 0, -1)
        ]
        longest = max((length for length, _, _ in matches), default=0)
        if not longest:
            return [], 0.0
        count = min(limit, int(self.factor * longest), self.depth - longest)
        paths = [behind(place, end)[:count] for length, place, end in matches if length == longest]
        return _voted(paths, count, self.least) if longest > 1 else _voted(paths[: suffix.VOTERS_OF_ONE], count, 1.0)

    def _agreement(self, text: list[int], place: list[int], end: int) -> int:
        length = 0
        while length < min(self.reach, len(text), end) and place[end - 1 - length] == text[-1 - length]:
            length += 1
        return length


def _going_on(text: list[int], end: int) -> list[int]:
    return (text[end:] * 100)[:100]


def _to_the_end(text: list[int], end: int) -> list[int]:
    return text[end:]


def _voted(paths: list[list[int]], count: int, least: float) -> tuple[list[int], float]:
    drafts, score, probability = list[int](), 0.0, 1.0
    while len(drafts) < count:
        place = len(drafts)
        tokens = [path[place] for path in paths if len(path) > place]
        if not tokens:
            break
        token = max(tokens, key=tokens.count)  # the first of equals is the most recent one
        probability *= tokens.count(token) / len(paths)
        if probability < least:
            break
        drafts.append(token)
        score += probability
        paths = [path for path in paths if path[place : place + 1] == [token]]
    return drafts, score


def proposer(*, depth: int = 24, factor: float = 1.0, least: float = 0.1, requests: int = 100) -> SuffixProposer:
    return SuffixProposer(
        max_tree_depth=depth,
        max_cached_requests=requests,
        max_spec_factor=factor,
        min_token_prob=least,
        max_model_len=512,
    )


def write(made: SuffixProposer, prompt: list[int], output: list[int], tenant: str = "") -> None:
    """A request comes and goes."""
    made.add_row(0, new_row(prompt, tenant=tenant))
    made.drop_row(0, np.array(prompt + output, np.int32))


def ask(made: SuffixProposer, text: list[int], refused: list[int], limit: int) -> list[int]:
    """Of row 1, in whose table drafts that were refused still stand behind its text."""
    batch = batch_of({1: text + refused}, [limit])
    return drafted(made.propose(replace(batch, lengths=np.array([len(text)]))))[0]


words = st.integers(0, 3)
outputs = st.tuples(
    st.sampled_from("ab"), st.lists(words, min_size=1, max_size=20), st.lists(words, min_size=1, max_size=20)
)
pieces = st.lists(st.lists(words, min_size=1, max_size=4), min_size=1, max_size=12)


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    past=st.lists(outputs, max_size=6),
    said=pieces,
    limit=st.integers(1, 8),
    model=st.builds(Model, st.sampled_from([2, 6, 24]), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.3])),
)
def test_the_longest_match_and_what_followed_it_most_often_are_those_of_a_search_through_everything(
    past: list[tuple[str, list[int], list[int]]], said: list[list[int]], limit: int, model: Model
) -> None:
    """Of the row's text and its tenant's outputs so far; drafts that were refused leave nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "TRIES", WITHOUT_BOUND)
        patch.setattr(suffix, "VOTERS", WITHOUT_BOUND)
        made = proposer(depth=model.depth, factor=model.factor, least=model.least)
        made.add_row(1, new_row(said[0], tenant="a"))
        text, found, kept = list[int](), list[int](), list[list[int]]()
        for number, piece in enumerate(said):
            if number < len(past):  # others end while the row goes on
                tenant, prompt, output = past[number]
                write(made, prompt, output, tenant)
                if tenant == "a":
                    kept.append((prompt + output)[max(0, len(prompt) - model.reach) :])
            text += piece
            found = ask(made, text, found, limit)
            assert found in model.drafts(text, kept, limit)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    past=st.lists(outputs, min_size=4, max_size=25),
    capacity=st.integers(1, 4),
    said=pieces,
)
def test_what_was_evicted_is_drafted_no_more(
    past: list[tuple[str, list[int], list[int]]], capacity: int, said: list[list[int]]
) -> None:
    """Also of a match that was found before: one output ends between any two steps of the row."""
    model = Model(24, 1.0, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "TRIES", WITHOUT_BOUND)
        patch.setattr(suffix, "VOTERS", WITHOUT_BOUND)
        made = proposer(least=model.least, requests=capacity)
        made.add_row(1, new_row(said[0], tenant="a"))
        text, kept = list[int](), list[tuple[str, list[int]]]()
        for number, (tenant, prompt, output) in enumerate(past):
            write(made, prompt, output, tenant)
            kept.append((tenant, (prompt + output)[max(0, len(prompt) - model.reach) :]))
            del kept[:-capacity]
            text += said[number % len(said)]
            assert len(made.past) == len(kept)
            assert ask(made, text, [], 6) in model.drafts(text, [each for owner, each in kept if owner == "a"], 6)


def test_two_outputs_of_equal_promise_are_drafted_from_the_more_recent_one() -> None:
    made = proposer()
    for tail in (31, 32):
        write(made, [1], [11, 12, tail])
    made.add_row(1, new_row([1]))
    assert guess(made, 1, [5, 11, 12], 1) == [32]


@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_short_match_is_found_however_many_places_agree_with_less_of_it(length: int) -> None:
    phrase, text = [7, 8, 9, 10][:length], list[int]()
    for number in range(TOOLS):
        text += [100 + number, *phrase[1:], 60]
    made = proposer()
    made.add_row(1, new_row([1]))
    assert guess(made, 1, [*phrase, 50, *text, *phrase], 1) == [50]


@pytest.mark.parametrize("tool", [0, 7, TOOLS - 1])
def test_a_match_is_followed_through_what_stood_in_many_places(tool: int) -> None:
    """The text behind the form depends on the name before it, and the last places of the form have other names."""
    made = proposer()
    for number in range(TOOLS):
        write(made, [1], [100 + number, *FORM, 1000 + number, 2000 + number])
    made.add_row(1, new_row([1]))
    text = [5, 100 + tool]
    assert guess(made, 1, text, 5) == FORM[:1]
    assert guess(made, 1, text + FORM, 5) == [1000 + tool, 2000 + tool]


def test_a_match_in_the_rows_own_text_is_followed_through_its_places() -> None:
    made, text = proposer(requests=0), list[int]()
    for number in range(TOOLS):
        text += [100 + number, *FORM, 1000 + number, 2000 + number]
    made.add_row(1, new_row(text))
    text = [*text, 3, 103]
    assert guess(made, 1, text, 5) == FORM[:1]
    text += FORM[:4]
    assert guess(made, 1, text, 9) == [*FORM[4:], 1003, 2003, 104]
    text += FORM[4:]
    assert guess(made, 1, text, 2) == [1003, 2003]


def test_a_match_that_was_followed_ends_where_the_row_goes_another_way() -> None:
    made = proposer()
    write(made, [1], list(range(200, 230)))
    made.add_row(1, new_row([1]))
    assert guess(made, 1, [1, 200, 201, 202], 3) == [203, 204, 205]
    assert guess(made, 1, [1, 200, 201, 202, 9], 3) == []
    assert guess(made, 1, [1, 200, 201, 202, 9, 203], 3) == [204], "one token agrees, not six"


def test_what_followed_a_single_token_is_drafted_where_its_last_places_agree() -> None:
    for text, wanted in (
        ([7, 50, 8, 7], [50]),
        ([7, 50, 7, 51, 8, 7], []),
        ([7, 51, 1, 7, 50, 2, 7, 50, 3, 7, 50, 4, 7], [50]),
    ):
        made = proposer()
        made.add_row(1, new_row([1]))
        assert guess(made, 1, text, 4) == wanted, text


def test_the_usual_least_probability_refuses_a_token_that_one_place_in_twelve_had() -> None:
    for places, wanted in ((8, [107]), (12, [])):
        made = proposer()
        made.add_row(1, new_row([1]))
        text = [token for number in range(places) for token in (7, 8, 100 + number)]
        assert guess(made, 1, [*text, 99, 7, 8], 1) == wanted


def test_places_are_not_taken_for_others_when_positions_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupellm.models.proposers.suffix_history.LAST_POSITION", 30)
    made = proposer()
    write(made, [1, 2, 3, 4], list(range(200, 230)))
    made.add_row(1, new_row([1, 2, 3, 4]))
    text = [1, 2, 3, 4, *range(200, 204)]
    assert guess(made, 1, text, 2) == [204, 205]
    write(made, [9], list(range(300, 330)))
    assert len(made.past) == 1
    # 307 now lies where the match would have gone on: of these tokens it alone agrees.
    assert guess(made, 1, [*text, 307], 5) == [308]
