"""Suffix decoding: a row's own tokens and its tenant's past outputs."""

import numpy as np
import pytest

from troupellm.models.proposers import suffix_index
from troupellm.models.proposers.suffix import SuffixProposer
from troupellm.models.proposers.suffix_history import MOST_PAST_TOKENS, PastOutputs
from troupellm.tests.support.speculation.proposals import guess, new_row

PROMPT = [100, 101, 102, 103]
OUTPUT = list(range(200, 230))


def proposer(
    *,
    max_tree_depth: int = 24,
    max_cached_requests: int = 100,
    max_spec_factor: float = 1.0,
    min_token_prob: float = 0.1,
) -> SuffixProposer:
    return SuffixProposer(
        max_tree_depth=max_tree_depth,
        max_cached_requests=max_cached_requests,
        max_spec_factor=max_spec_factor,
        min_token_prob=min_token_prob,
        max_model_len=512,
    )


def write(made: SuffixProposer, prompt: list[int], output: list[int], *, tenant: str = "", slot: int = 0) -> None:
    """A request comes and goes."""
    made.add_row(slot, new_row(prompt, tenant=tenant))
    made.drop_row(slot, np.array(prompt + output, np.int32))


def test_a_past_output_is_followed_from_its_prompts_end_on() -> None:
    made = proposer()
    write(made, PROMPT, OUTPUT)
    made.add_row(1, new_row(PROMPT))
    assert guess(made, 1, PROMPT, 10) == OUTPUT[:4]  # as many as match
    assert guess(made, 1, PROMPT + OUTPUT[:4], 5) == OUTPUT[4:9]
    assert guess(made, 1, [*PROMPT, *OUTPUT[:4], 7, *OUTPUT[20:24]], 9) == OUTPUT[24:28]


def test_drafts_are_as_long_as_the_match_times_the_factor_and_the_depth_allow() -> None:
    for factor, depth, wanted in ((1.0, 24, 12), (2.0, 24, 16), (0.5, 24, 8), (1.0, 8, 4), (0.0, 24, 0)):
        made = proposer(max_spec_factor=factor, max_tree_depth=depth)
        write(made, PROMPT, OUTPUT)
        made.add_row(1, new_row(PROMPT))
        text = PROMPT + OUTPUT[:13]
        assert guess(made, 1, text, 20) == OUTPUT[13 : 13 + wanted], (factor, depth)


def test_drafts_never_come_from_another_tenants_outputs() -> None:
    made = proposer()
    write(made, PROMPT, OUTPUT, tenant="a")
    made.add_row(1, new_row(PROMPT, tenant="b"))
    made.add_row(2, new_row(PROMPT, tenant="a"))
    assert guess(made, 1, PROMPT + OUTPUT[:8], 5) == []
    assert guess(made, 2, PROMPT + OUTPUT[:8], 5) == OUTPUT[8:13]
    write(made, PROMPT, [*OUTPUT[:8], 9, 9, 9], tenant="b", slot=1)
    made.add_row(1, new_row(PROMPT, tenant="b"))
    assert guess(made, 1, PROMPT + OUTPUT[:8], 5) == [9, 9, 9]


def test_tenants_stay_apart_where_their_buckets_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one bucket for everything each chain holds everybody's positions."""
    monkeypatch.setattr(suffix_index, "_MIXER", 0)
    monkeypatch.setattr("troupellm.models.proposers.suffix.TRIES", 1000)
    made = proposer()
    write(made, PROMPT, OUTPUT, tenant="a")
    made.add_row(1, new_row(PROMPT, tenant="b"))
    write(made, [5, 6], [7, 8], tenant="b", slot=2)
    assert guess(made, 1, PROMPT + OUTPUT[:8], 5) == []
    made.add_row(2, new_row(PROMPT, tenant="a"))
    assert guess(made, 2, PROMPT + OUTPUT[:2], 5) == OUTPUT[2:7]


def test_a_slot_forgets_the_row_before() -> None:
    made = proposer(max_cached_requests=0)
    made.add_row(0, new_row(PROMPT))
    assert guess(made, 0, PROMPT + OUTPUT + OUTPUT[:3], 2) == OUTPUT[3:5]
    made.drop_row(0, np.array(PROMPT + OUTPUT, np.int32))
    made.add_row(0, new_row(PROMPT, tenant="b"))
    assert guess(made, 0, PROMPT + OUTPUT[:3], 2) == []


def test_the_more_frequent_token_is_proposed_while_it_is_probable_enough() -> None:
    for least, wanted in ((0.1, [31, 41, 51]), (0.6, [31, 41]), (0.7, [])):
        made = proposer(min_token_prob=least)
        for tail in ([31, 41, 51], [31, 41, 52], [32, 42]):
            write(made, [1], [11, 12, 13, *tail])
        made.add_row(1, new_row([1]))
        # 31 has 2 of 3; the more recent of 51 and 52 is as frequent as the other.
        expected = [52 if token == 51 else token for token in wanted]
        assert guess(made, 1, [1, 11, 12, 13], 3) == expected


def test_the_rows_own_text_wins_where_it_is_surer() -> None:
    made = proposer()
    for tail in (31, 32, 33):
        write(made, [1], [11, 12, tail])
    made.add_row(1, new_row([1]))
    assert guess(made, 1, [5, 11, 12, 77, 78, 11, 12], 2) == [77, 78]


def test_a_text_that_repeats_itself_goes_on() -> None:
    made = proposer()
    made.add_row(0, new_row([1]))
    assert guess(made, 0, [9, 4, 5, 4, 5, 4, 5, 4, 5], 4) == [4, 5, 4, 5]


def test_what_was_written_before_a_preemption_is_kept_once() -> None:
    made = proposer()
    write(made, PROMPT, OUTPUT[:10])
    made.add_row(0, new_row(PROMPT + OUTPUT[:10], prompt=len(PROMPT)))
    made.drop_row(0, np.array(PROMPT + OUTPUT[:12], np.int32))
    assert len(made.past) == 2
    for tail in (31, 32):
        write(made, PROMPT, [*OUTPUT[:2], tail])
    made.add_row(1, new_row(PROMPT))
    # One vote for what came before the preemption, and it is the oldest one.
    assert guess(made, 1, PROMPT + OUTPUT[:2], 1) == [32]
    made.drop_row(1, np.array(PROMPT, np.int32))
    assert len(made.past) == 4  # nothing was written


def test_a_reset_keeps_past_outputs() -> None:
    made = proposer()
    write(made, PROMPT, OUTPUT)
    made.reset()
    made.add_row(0, new_row(PROMPT))
    assert guess(made, 0, PROMPT, 2) == OUTPUT[:2]


def test_what_is_kept_is_told_with_its_bound() -> None:
    made = proposer(max_cached_requests=2)
    for _ in range(3):
        write(made, PROMPT, OUTPUT)
    told = made.report()
    assert (told.past_outputs, told.past_evictions, told.failures) == (2, 1, 0)
    assert told.past_tokens == made.past.num_tokens > 2 * len(OUTPUT)
    assert told.past_tokens_capacity == MOST_PAST_TOKENS
    # Token, owner, and of each length a link and two buckets; of a row the same without its owner.
    row = told.memory_bytes - made.past.nbytes
    assert made.past.nbytes == 68 * MOST_PAST_TOKENS
    assert row == 64 * 512
    write(made, PROMPT, OUTPUT, slot=7)
    assert made.report().memory_bytes == told.memory_bytes + row
    nothing = proposer(max_cached_requests=0)
    write(nothing, PROMPT, OUTPUT)
    assert (nothing.report().past_outputs, nothing.report().past_tokens_capacity) == (0, 0)


def test_the_oldest_outputs_go_first() -> None:
    kept = PastOutputs((2,), most_texts=3, most_tokens=1024)
    for number in range(5):
        kept.add(str(number % 2), np.array([number, 1, 2, 3], np.int32))
    assert len(kept) == 3
    owner = kept.owner("0")
    assert owner is not None
    assert _find(kept, owner, [2, 3], before=[4, 1]) == 1
    assert _find(kept, owner, [1, 2], before=[4]) == 1
    assert _find(kept, owner, [1, 2], before=[0]) == 0


def test_a_text_is_followed_to_its_end_and_no_further() -> None:
    kept = PastOutputs((2,), most_texts=9, most_tokens=16)
    for number in range(9):  # across the ring's end
        kept.add("a", np.array([number, 1, 2], np.int32))
        kept.add("b", np.array([7, 7, 7], np.int32))
        probe = suffix_index.MatchIndex((2,), 64)
        probe.extend(np.array([number, 1], np.int32))
        match = kept.find(kept.owner("a") or 0, 0, probe.hashes[0], [number, 1], tries=9, most=9)
        assert [kept.follow(position, 5) for position in match.positions] == [[2]]


def test_memory_is_bounded_by_tokens_too_and_a_tenant_without_outputs_is_forgotten() -> None:
    kept = PastOutputs((2,), most_texts=1000, most_tokens=256)
    random = np.random.default_rng(0)
    for number in range(200):
        kept.add(f"tenant {number}", random.integers(0, 50, int(random.integers(1, 200))).astype(np.int32))
        assert kept.num_tokens <= 256
    assert 1 <= len(kept) == kept.num_tenants <= 20
    assert kept.num_evicted == 200 - len(kept)
    assert kept.owner("tenant 0") is None
    assert kept.owner("tenant 199") is not None


def test_positions_begin_anew_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupellm.models.proposers.suffix_history.LAST_POSITION", 500)
    kept = PastOutputs((2,), most_texts=1000, most_tokens=64)
    for number in range(100):
        kept.add("a", np.array([number, 1, 2, 3], np.int32))
        owner = kept.owner("a")
        assert owner is not None
        assert _find(kept, owner, [1, 2], before=[number]) == 1
    assert kept.num_evicted == 100 - len(kept)


def _find(kept: PastOutputs, owner: int, context: list[int], before: list[int]) -> int:
    """How many places whose tokens before the context are these."""
    probe = suffix_index.MatchIndex((2,), 64)
    probe.extend(np.array(context, np.int32))
    match = kept.find(owner, 0, probe.hashes[0], before + context, tries=100, most=9)
    return len(match.positions) if match.length == len(before) + len(context) else 0
