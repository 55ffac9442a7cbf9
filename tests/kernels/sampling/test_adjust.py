"""Changes to listed logits, on numbers that can be checked by hand."""

import torch

from troupellm.kernels.sampling.adjust import matches, occurrence_penalty, penalize, repeat_penalty


def test_a_repetition_penalty_lowers_logits_of_either_sign_once() -> None:
    logits = torch.tensor([[4.0, -4.0, 4.0]])
    repeat_penalty(logits, torch.tensor([0, 1, 1]), torch.tensor([2.0, 2.0, 2.0]))
    assert logits.tolist() == [[2.0, -8.0, 4.0]]


def test_penalties_of_whole_rows_lower_logits_of_either_sign() -> None:
    logits, counts, seen = torch.tensor([[4.0, -4.0, 4.0]]), torch.tensor([[0, 1, 0]]).int(), torch.tensor([[1]]).int()
    penalize(logits, torch.tensor([0]), counts, seen, torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25]))
    assert logits.tolist() == [[2.0, -8.75, 4.0]]


def test_an_occurrence_penalty_counts_each_listing_and_the_presence_once() -> None:
    logits, places = torch.zeros(1, 3), torch.tensor([2, 0, 2])
    each = torch.ones(3)
    occurrence_penalty(logits, places, 0.5 * each, 0.25 * each, torch.zeros(2), torch.tensor([0, 1, 0]))
    assert logits.tolist() == [[-0.75, 0.0, -1.25]]


def test_a_text_matches_a_prefix_that_it_ends_in() -> None:
    tails = torch.tensor([[1, 2, 3], [-1, -1, 3], [1, 2, 3]])
    prefixes = torch.tensor([[-2, 2, 3], [-2, 2, 3], [-2, -2, -2]])
    assert matches(tails, prefixes).tolist() == [True, False, True]
