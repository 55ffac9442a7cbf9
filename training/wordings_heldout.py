"""Wordings as people might type them, for the final measurement only.

They were written apart from the grammar and none of its frames were made from them. The set is worn
out as soon as training is tuned on it: then it moves into the grammar and a new one is written.
"""

import random

from troupellm.training import facts

WORDINGS: dict[str, tuple[str, ...]] = {
    "capital": (
        "{s} has lots of cities, but which one is the capital?",
        "my teacher asked for the capital of {s}, help",
    ),
    "continent": ("I found {s} on the map. Which continent is it part of?", "what continent do people in {s} live on"),
    "sound": ("If a {s} is outside my window, what sound will I hear?", "a {s} opens its mouth, what noise comes out"),
    "baby": ("A mother {s} has a little one. What do we call it?", "before it grows up, what is a young {s} called"),
    "legs": ("How many legs should I give a {s} in my drawing?", "a {s} is in my book, can you count its legs"),
    "home": ("I'm a {s} and I want to go home. Where do I go?", "what's the name for the house of a {s}"),
    "colour": ("I want to draw {s}. Which color crayon do I need?", "think of {s}, what color do you see"),
    "opposite": (
        "My brother says {s} and I want to say the opposite. What do I say?",
        "{s} has an opposite, which is it",
    ),
    "plural": ("I had one {s} and now I have two. Two what?", "what does the word {s} turn into for more than one"),
    "past": ("How do I say {s} if it all happened last week?", "my story is in the past, what do I write for {s}"),
    "symbol": (
        "What letter or letters do chemists write for {s}?",
        "we had {s} in science class, what's its symbol again",
    ),
    "day after": (
        "It's {s} and my party is tomorrow. What day is my party?",
        "i fall asleep on {s} and wake up on which day",
    ),
    "day before": (
        "It's {s} now and I lost my hat yesterday. What day was that?",
        "which day do we have right before {s}",
    ),
    "month after": (
        "My birthday is in the month right after {s}. Which month is that?",
        "it's {s} now, what will next month be",
    ),
    "month days": ("How long is {s} if I count the days?", "how many days do I need on my calendar page for {s}"),
    "sides": ("My homework has a {s} on it. How many sides has it got?", "please count the sides on a {s}"),
    "hello": (
        "What would a {s} child say instead of hello?",
        "my new neighbor only knows {s}, how can I tell her hello",
    ),
    "thanks": ("Grandma speaks only {s} and I want to thank her. What do I say?", "thank you, but in {s} please"),
    "emoji": ("I want to text my friend a {s}. Which emoji is that?", "got an emoji with a {s} on it"),
    "currency": (
        "What kind of money do people in {s} have in their pockets?",
        "i want to buy ice cream in {s}, with what money",
    ),
}


def evaluation(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Facts in these wordings with the sentences expected; ``count`` 0 asks everything once."""
    cases = [(f.ask(w), f.sentence()) for f in facts.FACTS for w in WORDINGS[f.relation.name]]
    return rng.sample(cases, count) if count else cases
