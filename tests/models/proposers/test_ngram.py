"""Prompt lookup."""

import numpy as np
import pytest
from numpy.typing import NDArray

from troupellm.models.proposers.ngram import NgramProposer, make, of_device, of_host
from troupellm.models.proposers.suffix import SuffixProposer
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.tests.support.speculation.proposals import batch_of, drafted, guess, new_row


def proposer(low: int, high: int) -> NgramProposer:
    made = NgramProposer(lookup_min=low, lookup_max=high, max_model_len=512)
    for slot in range(4):
        made.add_row(slot, new_row([1]))
    return made


def suffix_proposer() -> SuffixProposer:
    made = SuffixProposer(
        max_tree_depth=24, max_cached_requests=9, max_spec_factor=1.0, min_token_prob=0.1, max_model_len=512
    )
    made.add_row(0, new_row([1]))
    return made


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert guess(proposer(2, 4), 0, [7, 8, 9, 10, 11, 5, 7, 8], 3) == [9, 10, 11]


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    text = [1, 2, 3, 40, 41, 9, 2, 3, 50, 51, 9, 1, 2, 3]
    assert guess(proposer(2, 4), 0, text, 2) == [40, 41]
    assert guess(proposer(2, 2), 0, text, 2) == [50, 51]


def test_of_equal_matches_the_most_recent_one_wins() -> None:
    assert guess(proposer(2, 2), 0, [1, 2, 30, 1, 2, 31, 1, 2], 1) == [31]


def test_nothing_is_proposed_without_a_match_of_the_least_length() -> None:
    assert guess(proposer(3, 5), 0, [1, 2, 3, 9, 2, 3], 4) == []
    assert guess(proposer(3, 5), 1, [1], 4) == []


def test_a_least_length_beyond_what_is_indexed_is_still_the_least() -> None:
    phrase = list(range(100, 120))
    assert guess(proposer(20, 20), 0, [*phrase, 5, *phrase], 2) == [5, 100]
    assert guess(proposer(20, 20), 1, [9, *phrase[1:], 5, *phrase], 2) == []


def test_a_text_that_repeats_itself_goes_on_with_its_period() -> None:
    assert guess(proposer(2, 3), 0, [9, 4, 5, 4, 5, 4, 5], 5) == [4, 5, 4, 5, 4]


def test_a_batch_has_each_row_answered_from_its_own_tokens_within_its_limit() -> None:
    made = proposer(2, 2)
    texts = {2: [1, 2, 3, 4, 5, 1, 2], 0: [6, 7, 8], 3: [1, 2, 9, 9, 9, 1, 2]}
    assert drafted(made.propose(batch_of(texts, [2, 5, 3]))) == [[3, 4], [], [9, 9, 9]]


def test_a_row_grows_and_its_slot_is_given_away() -> None:
    made, text = proposer(2, 2), [1, 2, 3]
    for token in [4, 5, 1, 2, 3, 4]:
        text.append(token)
        guess(made, 0, text, 1)
    assert guess(made, 0, text, 3) == [5, 1, 2]
    made.drop_row(0, _array(text))
    made.add_row(0, new_row([1]))
    assert guess(made, 0, [8, 3, 4], 3) == []
    assert guess(made, 0, [8, 3, 4, 6, 3, 4], 1) == [6]


def test_a_row_that_was_not_asked_for_long_drafts_from_its_whole_text() -> None:
    made, suffixes = proposer(2, 4), suffix_proposer()
    said = list(range(20, 60))
    for each in (made, suffixes):
        assert guess(each, 0, [7, 8], 3) == []
        assert guess(each, 0, [7, 8, *said, 7, 8, *said[:12]], 3) == said[12:15]


@pytest.mark.parametrize("firsts", [[0, 0, 0], [3, 7, 1], [7, 7, 3], [4, 6, 9]])
def test_of_a_table_on_a_device_each_row_has_what_it_said_since(firsts: list[int]) -> None:
    batch = batch_of({2: [1, 2, 3, 4, 5, 1, 2], 0: [6, 7, 8, 3, 3, 3, 7], 3: [1, 2, 9]}, [2, 5, 3])
    given, wanted = of_device(batch, firsts), of_host(batch, firsts)
    assert [part.tolist() for part in given] == [part.tolist() for part in wanted]
    assert all(part.dtype == np.int32 for part in given)
    assert sum(part.size for part in given) == sum(
        max(0, length - first) for length, first in zip([7, 7, 3], firsts, strict=True)
    )


def test_after_a_reset_rows_come_again() -> None:
    made = proposer(2, 2)
    made.reset()
    made.add_row(0, new_row([1]))
    assert guess(made, 0, [1, 2, 3, 1, 2], 1) == [3]


def test_every_proposal_is_what_a_search_through_the_text_finds() -> None:
    random = np.random.default_rng(3)
    made, text = proposer(2, 4), random.integers(0, 6, 30).tolist()
    some = 0
    for _ in range(300):
        text += random.integers(0, 6, random.integers(1, 4)).tolist()
        if len(text) > 500:
            made.add_row(0, new_row([1]))
            text = text[:30]
        expected = searched(text, 2, 4, 3)
        some += bool(expected)
        assert guess(made, 0, text, 3) == expected
    assert some > 100


def searched(text: list[int], low: int, high: int, count: int) -> list[int]:
    for size in range(high, low - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                period = text[end:]
                return [period[place % len(period)] for place in range(count)]
    return []


def test_the_lengths_follow_vllm() -> None:
    class Context:
        max_model_len = 64

    def lengths(**keys: int) -> tuple[int, int]:
        made = make(SpeculativeConfig(method="ngram", num_speculative_tokens=3, **keys), Context())  # type: ignore[arg-type]
        return made.lookup

    assert lengths() == (5, 5)
    assert lengths(prompt_lookup_max=4) == (4, 4)
    assert lengths(prompt_lookup_min=3) == (3, 3)
    assert lengths(prompt_lookup_min=2, prompt_lookup_max=4) == (2, 4)


def _array(text: list[int]) -> NDArray[np.int32]:
    return np.array(text, np.int32)
