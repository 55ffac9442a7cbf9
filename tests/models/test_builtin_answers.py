"""What the shipped model says to what newcomers ask first."""

import pytest
from tokenizers import Tokenizer

from troupellm.models.builtin import arithmetic
from troupellm.models.builtin.card import CARD, replaced, samples
from troupellm.models.builtin.decode import greedy
from troupellm.models.builtin.documents import Chat, Exchange
from troupellm.models.builtin.evaluate import GROUP, WEIGHTS, load, opening
from troupellm.models.builtin.network import Network


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


def test_the_samples_of_the_card_are_what_the_model_says(model: tuple[Network, Tokenizer]) -> None:
    card = CARD.read_text(encoding="utf-8")
    assert replaced(card, "samples", samples(*model)) == card
