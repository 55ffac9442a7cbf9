"""The shipped model's answers to newcomers' first questions."""

import random

import pytest
from tokenizers import Tokenizer

from troupellm.training import arithmetic, facts
from troupellm.training.card import CARD, replaced, samples
from troupellm.training.decode import greedy
from troupellm.training.documents import Chat, Exchange
from troupellm.training.evaluate import GROUP, WEIGHTS, load, opening
from troupellm.training.network import Network


@pytest.fixture(scope="module")
def model() -> tuple[Network, Tokenizer]:
    return load(WEIGHTS)


def _prompt(question: str) -> str:
    chat = Chat()
    chat.ask(Exchange(question, ""))
    return opening(chat)


@pytest.mark.parametrize("sign", ["+", "-"])
def test_one_plus_one_and_all_small_operands_are_right(model: tuple[Network, Tokenizer], sign: str) -> None:
    """Once ten sums of these 169 were wrong, `1 + 1 = 4` the first of them."""
    asked = [arithmetic.usual(problem)[0] for problem in arithmetic.small_problems(sign)]
    wrong: list[str] = []
    for at in range(0, len(asked), GROUP):
        group = asked[at : at + GROUP]
        said = greedy(*model, [_prompt(question) for question, _ in group], 24)
        wrong += [text for (_, answer), text in zip(group, said, strict=True) if text != answer]
    assert wrong == []


@pytest.mark.parametrize("sign", ["+", "-"])
def test_pairs_of_operands_that_training_never_showed_are_added_and_subtracted(
    model: tuple[Network, Tokenizer], sign: str
) -> None:
    """A sample of what the card counts, in any wording; of all such pairs it has every one right."""
    asked = arithmetic.evaluation(random.Random(f"a sample of {sign}"), sign, GROUP)
    said = greedy(*model, [_prompt(question) for question, _ in asked], 24)
    wrong = [(question, text) for (question, answer), text in zip(asked, said, strict=True) if text != answer]
    assert len(asked) == GROUP
    assert 1 - len(wrong) / GROUP >= 0.95, wrong


@pytest.mark.parametrize(("part", "least"), [("combinations", 0.95), ("openers", 0.95), ("phrases", 0.85)])
def test_facts_are_known_in_wordings_that_training_never_showed(
    model: tuple[Network, Tokenizer], part: str, least: float
) -> None:
    """A sample of what the card counts; of its figures the last is 96 %, so that a sample may have less."""
    asked = facts.evaluation(random.Random(f"a sample of {part}"), part, GROUP)
    said = greedy(*model, [_prompt(question) for question, _ in asked], 64)
    wrong = [(question, text) for (question, answer), text in zip(asked, said, strict=True) if text != answer]
    assert len(asked) == GROUP
    assert 1 - len(wrong) / GROUP >= least, wrong


def test_the_samples_of_the_card_are_what_the_model_says(model: tuple[Network, Tokenizer]) -> None:
    card = CARD.read_text(encoding="utf-8")
    assert replaced(card, "samples", samples(*model)) == card
