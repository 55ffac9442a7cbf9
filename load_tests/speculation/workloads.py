"""What is asked, of the built-in model in texts of its training's kinds, and of random ones in random tokens."""

import random

from troupellm.load_tests.speculation.question import Question

LIST_WORDS = 12
RANDOM_PROMPT = 64


def copying(count: int) -> list[Question]:
    """Lists to say again that stand in the prompt twice already: an earlier turn and the question."""
    from troupellm.models.builtin.documents import Chat, Exchange
    from troupellm.models.builtin.words import CITIES, ITEMS, NAMES, WORDS

    source, questions = random.Random("copying"), []
    for _ in range(count):
        listed = " ".join(source.choices(WORDS + NAMES + CITIES + ITEMS, k=LIST_WORDS))
        chat = Chat()
        for _ in range(2):
            chat.ask(Exchange(f"Repeat: {listed}", listed))
        text = "".join(piece.text for piece in chat.pieces())
        questions.append(Question(text[: text.rindex(listed)]))
    return questions


def held_out(count: int) -> dict[str, list[Question]]:
    """Prompts by kind that the model and its drafters were not trained on."""
    from troupellm.models.builtin.drafters.evaluate import prompts

    return {kind: [Question(text) for text in texts] for kind, texts in prompts(count).items()}


def mixed(count: int, output_len: int) -> list[Question]:
    """As many of all kinds, answered to the same length."""
    kinds = held_out(-(-count // 6))
    asked = [each for group in zip(*kinds.values(), strict=True) for each in group]
    return [Question(each.prompt, output_len, ignore_eos=True) for each in asked[:count]]


def random_tokens(count: int, output_len: int, vocabulary: int) -> list[Question]:
    source = random.Random("random tokens")
    return [
        Question(source.choices(range(1, vocabulary), k=RANDOM_PROMPT), output_len, ignore_eos=True)
        for _ in range(count)
    ]
