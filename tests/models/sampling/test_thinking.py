import pytest
import torch

from troupellm.models.sampling.thinking_budget import ThinkingWatch
from troupellm.protocol.messages.worker import ThinkingState

START, END = (7,), (8, 9)


def watch(budget, prompt=(1, 2), *, inside=None, ends=(END,)):
    return ThinkingWatch(ThinkingState(budget=budget, open=inside, starts=(START,), ends=ends), torch.tensor(prompt))


def follow(watch, wanted):
    """The resulting tokens when a model wants these tokens and the watch overrules some of them."""
    said = []
    for token in wanted:
        said.append(token if watch.forced is None else watch.forced)
        watch.feed(said[-1:])
    return said


def test_the_end_is_forced_after_the_budget_and_then_anything_goes():
    assert follow(watch(2), [5, 7, 5, 5, 5, 5, 5, 5]) == [5, 7, 5, 5, 8, 9, 5, 5]


def test_without_thinking_nothing_is_forced():
    assert follow(watch(0), [5] * 6) == [5] * 6


def test_a_budget_of_nothing_ends_thinking_where_it_begins():
    assert follow(watch(0), [5, 7, 5, 5, 5]) == [5, 7, 8, 9, 5]
    assert follow(watch(0, inside=True), [5, 5, 5]) == [8, 9, 5]


def test_a_model_that_ends_by_itself_is_left_alone():
    assert follow(watch(5), [7, 5, 8, 9] + [5] * 9) == [7, 5, 8, 9] + [5] * 9


def test_what_is_thought_again_counts_too():
    assert follow(watch(4), [7, 5, 8, 9, 5, 7, 5, 5, 5, 5]) == [7, 5, 8, 9, 5, 7, 5, 8, 9, 5]


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [((1, 7, 2), True), ((7, 1, 8, 9), False), ((8, 9, 1, 7), True), ((7,), True), ((1, 8, 2), False), ((9, 8), False)],
)
def test_the_marks_in_the_prompt_tell_where_the_answer_begins(prompt, inside):
    assert watch(1, prompt).thinking is inside


def test_a_mark_may_begin_in_the_prompt():
    assert follow(watch(1, (1, 7, 8)), [9, 5, 5, 5]) == [9, 5, 5, 5]


def test_a_mark_at_no_token_border_is_none():
    state = ThinkingState(budget=0, open=None, starts=((1 << 8,),), ends=((3,),))
    assert not ThinkingWatch(state, torch.tensor([1 << 16, 0])).thinking
    assert ThinkingWatch(state, torch.tensor([1 << 16, 1 << 8])).thinking


def test_thinking_ends_with_any_spelling_of_its_end_mark():
    ends = (END, (8, 10))
    assert follow(watch(6, ends=ends), [7, 5, 8, 10, 5, 5, 5, 5, 5, 5]) == [7, 5, 8, 10, 5, 5, 5, 5, 5, 5]


def test_a_mark_that_the_model_is_writing_when_the_budget_ends_is_written_to_its_end():
    assert follow(watch(2), [7, 5, 8, 5, 5, 5]) == [7, 5, 8, 9, 5, 5]
    assert follow(watch(2, ends=((8, 8, 9),)), [7, 8, 8, 5, 5]) == [7, 8, 8, 9, 5]
    assert follow(watch(3, ends=((8, 8, 9),)), [7, 8, 8, 8, 5, 5]) == [7, 8, 8, 8, 9, 5]
    assert follow(watch(2, ends=(END, (6, 10))), [7, 5, 6, 5, 5]) == [7, 5, 6, 10, 5]
    assert follow(watch(1, ends=(END, (6, 10))), [7, 6, 5, 7, 5, 5, 5]) == [7, 6, 10, 7, 8, 9, 5]


def test_tokens_before_the_thinking_do_not_count_as_its_end_mark():
    assert follow(watch(1, (1, 8, 7)), [5, 5, 5, 5]) == [5, 8, 9, 5]
    assert follow(watch(0, (1, 8), inside=True), [5, 5, 5]) == [8, 9, 5]


@pytest.mark.parametrize("cut", range(9))
def test_a_replayed_sequence_has_the_same_thinking_budget(cut):
    tokens = follow(watch(2), [7, 5, 5, 5, 5, 5, 7, 5, 5])
    again = watch(2)
    again.feed(tokens[:cut])
    assert again.seen == 2 + cut
    assert tokens[:cut] + follow(again, [7, 5, 5, 5, 5, 5, 7, 5, 5][cut:]) == tokens
