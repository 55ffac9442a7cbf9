"""A second set of unseen wordings, written after the training run and measured once.

While the model was being trained, failures on the first set of held-out wordings were read and
wordings near some of them were added to the training part. This set has no such history; it becomes
as worn as the first as soon as somebody tunes on it.
"""

import random

from troupellm.models.builtin import facts

WORDINGS: dict[str, tuple[str, ...]] = {
    "capital": ("Could you name {s}'s capital city?", "Where is the government of {s}? Name the capital."),
    "continent": ("Could you say on which continent {s} lies?", "Name {s}'s continent."),
    "sound": ("When a {s} makes a noise, what is it?", "Imitate a {s}."),
    "baby": ("A baby {s} goes by which name?", "What is the proper word for a young {s}?"),
    "legs": ("Tell me how many legs a {s} has.", "Legs of a {s}: how many?"),
    "home": ("What is the place called where a {s} lives?", "A {s} makes its home where?"),
    "colour": ("Could you describe the colour of {s}?", "{s} is what colour?"),
    "opposite": ("What is the contrary of {s}?", "If something is not {s}, what is its opposite?"),
    "plural": ("More than one {s}: what is the plural?", "Could you form the plural of {s}?"),
    "past": ("Could you form the past tense of {s}?", "Yesterday form of the verb {s}: what is the past tense?"),
    "symbol": ("In the periodic table, what is the symbol of {s}?", "Could you write the chemical symbol of {s}?"),
    "day after": ("If it is {s} now, which day comes next?", "Could you name the day that comes after {s}?"),
    "day before": ("If it is {s} now, which day came before?", "Could you name the day that comes before {s}?"),
    "month after": ("If it is {s} now, which month comes next?", "Could you name the month that comes after {s}?"),
    "month days": ("{s} is how many days long?", "Could you tell me how many days {s} has?"),
    "sides": ("Could you say how many sides a {s} has?", "The number of sides on a {s} is what?"),
    "hello": ("What do people in the {s} language say for hello?", "Could you greet me with hello in {s}?"),
    "thanks": ("Could you translate thank you into {s}?", "In {s}, how is thank you said?"),
    "emoji": ("I want to see the emoji of a {s}.", "Could you draw the {s} emoji?"),
    "currency": ("Could you name {s}'s currency?", "People in {s} pay with which currency?"),
}


def evaluation(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Facts in these wordings with the sentences expected; ``count`` 0 asks everything once."""
    cases = [(f.ask(w), f.sentence()) for f in facts.FACTS for w in WORDINGS[f.relation.name]]
    return rng.sample(cases, count) if count else cases
