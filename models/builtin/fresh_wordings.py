"""Wordings as people might type them, for the final measurement only.

They were written apart from the grammar and none of its frames were made from them. The set is worn
out as soon as somebody tunes on it: then it moves into the grammar and a new one is written.
"""

import random

from troupellm.models.builtin import facts

WORDINGS: dict[str, tuple[str, ...]] = {
    "capital": ("I'm planning a trip to {s}, what's the capital there?", "what's {s} capital called"),
    "continent": ("Is {s} in Europe, Asia, or where?", "Which of the continents would I visit if I went to {s}?"),
    "sound": ("My kid wants to hear what a {s} sounds like.", "So what kind of noise would a {s} make?"),
    "baby": ("When a {s} has a baby, what is it called?", "is there a special word for baby {s}"),
    "legs": ("Hey how many legs does a {s} actually have?", "If I look at a {s}, how many legs will I see?"),
    "home": ("What do you call the thing a {s} lives in?", "where do you usually find a {s} living"),
    "colour": ("If I paint {s}, which color should I take?", "Is there a typical color for {s}?"),
    "opposite": ("I need a word that means the opposite of {s}", "not {s} but the opposite, what is the word"),
    "plural": (
        "How would I spell the plural of {s} correctly?",
        "If there are many, do I write {s} or something else?",
    ),
    "past": ("I {s} today, but what is it for yesterday?", "What's the correct past tense for {s} in English?"),
    "symbol": ("Which abbreviation is {s} on the periodic table?", "how do you abbreviate the element {s}"),
    "day after": ("Yesterday was {s}, so what day is it today?", "When {s} is over, what day starts?"),
    "day before": ("Tomorrow is {s}, so what day is it today?", "What was the day just before {s}?"),
    "month after": ("Once {s} is over, what month starts?", "Last month was {s}, which one is it now?"),
    "month days": ("Does {s} have 30 or 31 days, or something else?", "When does {s} end, after how many days?"),
    "sides": ("If I draw a {s}, how many sides do I need?", "a {s} in geometry, how many sides is that"),
    "hello": ("I'm meeting somebody who speaks {s}, how do I say hello?", "Teach me to say hello in {s}!"),
    "thanks": ("A {s} friend helped me, how do I say thank you?", "Teach me to say thank you in {s}!"),
    "emoji": ("can you send the {s} emoji pls", "I'd like a little {s} emoji here."),
    "currency": ("I'm travelling to {s}, which currency do I need?", "If I shop in {s}, what currency do I pay in?"),
}


def evaluation(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Facts in these wordings with the sentences expected; ``count`` 0 asks everything once."""
    cases = [(f.ask(w), f.sentence()) for f in facts.FACTS for w in WORDINGS[f.relation.name]]
    return rng.sample(cases, count) if count else cases
