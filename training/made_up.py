"""Names that stand in no list, so that they can only be copied."""

import random

from troupellm.load_tests.speculation import words


def word(rng: random.Random) -> str:
    """A made-up word of two to four syllables."""
    syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))
    return "".join(syllables)


def identifier(rng: random.Random) -> str:
    """A name as programs use it: one word or two, joined in one of the usual ways."""
    parts = [word(rng) if rng.random() < 0.4 else rng.choice(words.WORDS + words.ITEMS) for _ in range(2)]
    style = rng.random()
    if style < 0.45:
        return parts[0]
    if style < 0.8:
        return "_".join(parts)
    return parts[0] + parts[1].capitalize()
