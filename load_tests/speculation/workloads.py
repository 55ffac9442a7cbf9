"""The prompts, of the built-in model in texts of its training's kinds, and of random ones in random tokens."""

import random
from itertools import cycle, islice
from pathlib import Path

import msgspec

from troupellm.load_tests.speculation.chat_text import prompt_of
from troupellm.load_tests.speculation.question import Question
from troupellm.load_tests.speculation.words import CITIES, ITEMS, NAMES, WORDS

HELD_OUT = Path(__file__).with_name("held_out.json")
"""`troupellm.training.drafters_evaluate.prompts` made it."""
LIST_WORDS = 12
LENGTHS, LENGTHS_APART = 16, 7
"""How many lengths of answers there are, and how far one is from the next."""
RANDOM_PROMPT = 64


def copying(count: int) -> list[Question]:
    """Lists to say again that stand in the prompt twice already: an earlier turn and the question."""
    source, questions = random.Random("copying"), []
    for _ in range(count):
        listed = " ".join(source.choices(WORDS + NAMES + CITIES + ITEMS, k=LIST_WORDS))
        request = f"Repeat: {listed}"
        questions.append(Question(prompt_of([request, listed, request])))
    return questions


def held_out(count: int) -> dict[str, list[Question]]:
    """Prompts by kind that the model and its drafters were not trained on; those of the file over and over."""
    kinds: dict[str, list[str]] = msgspec.json.decode(HELD_OUT.read_bytes())
    return {kind: [Question(text) for text in islice(cycle(texts), count)] for kind, texts in kinds.items()}


def mixed(count: int, output_len: int) -> list[Question]:
    """As many of all kinds. Their answers are from two to four thirds as long as `output_len`, and as long on average:
    sequences of one length that begin together end together, as no crowd does, as long as none of them drafts."""
    kinds = held_out(-(-count // 6))
    asked = [each for group in zip(*kinds.values(), strict=True) for each in group]
    lengths = [output_len * 2 // 3 + output_len * 2 * place // (3 * (LENGTHS - 1)) for place in range(LENGTHS)]
    return [
        Question(each.prompt, lengths[LENGTHS_APART * index % LENGTHS], ignore_eos=True)
        for index, each in enumerate(asked[:count])
    ]


def random_tokens(count: int, output_len: int, vocabulary: int) -> list[Question]:
    source = random.Random("random tokens")
    return [
        Question(source.choices(range(1, vocabulary), k=RANDOM_PROMPT), output_len, ignore_eos=True)
        for _ in range(count)
    ]
