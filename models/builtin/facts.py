"""Questions over the fixed table of facts, in wordings seen in training and wordings held out.

A wording is a core sentence, sometimes with an opening in front. The cores in ``held_out`` never
reach the training text: they tell whether the model learned the facts or only the phrases.
"""

import random
import re
from dataclasses import dataclass

from troupellm.models.builtin import fact_tables as tables
from troupellm.models.builtin.documents import Exchange, Piece


@dataclass(frozen=True, slots=True)
class Relation:
    """One relation of the table with its wordings; ``{s}`` is the subject, ``{o}`` the answer."""

    name: str
    table: str
    answer: str
    wordings: tuple[str, ...]
    held_out: tuple[str, ...]


def _relation(name: str, table: str, answer: str, seen: str, unseen: str) -> Relation:
    return Relation(name, table, answer, tuple(seen.split("|")), tuple(unseen.split("|")))


RELATIONS = (
    _relation("capital", tables.CAPITALS, "The capital of {s} is {o}.",
        "What is the capital of {s}?|What's the capital of {s}?|What is the capital city of {s}?"
        "|Which city is the capital of {s}?|Name the capital of {s}.|capital of {s}"
        "|What city is {s}'s capital?|I need to know the capital of {s}.|The capital of {s} is"
        "|What is {s}'s capital city?"
        "|Give me the capital of {s}.|Do you know the capital of {s}?|Which is the capital of {s}?"
        "|Tell me {s}'s capital.|What is the name of the capital of {s}?",
        "Which city is {s}'s capital?|Give me the name of the capital of {s}."
        "|Do you know what the capital city of {s} is?"),
    _relation("continent", tables.CONTINENTS, "{s} is in {o}.",
        "Which continent is {s} in?|What continent is {s} on?|On which continent is {s}?"
        "|What is the continent of {s}?|Name the continent where {s} is.|Where in the world is {s}?"
        "|In what continent is {s} found?"
        "|On which continent do I find {s}?|{s} is on which continent?"
        "|What continent does {s} lie on?|Which continent has {s} in it?|On what continent is {s}?",
        "Which continent does {s} belong to?|On what continent can I find {s}?"),
    _relation("sound", tables.SOUNDS, "The {s} says {o}.",
        "What sound does a {s} make?|What does a {s} say?|What does the {s} say?"
        "|Which sound does the {s} make?|What noise does a {s} make?|How does a {s} sound?"
        "|Make the sound of a {s}.|Name the sound of the {s}."
        "|What is the sound a {s} makes?|What noise does the {s} make?"
        "|Which noise comes from a {s}?|Which noise does a {s} make?",
        "What is the sound of a {s}?|Which noise does the {s} make?"),
    _relation("baby", tables.BABIES, "A baby {s} is called a {o}.",
        "What is a baby {s} called?|What do you call a baby {s}?|What is the name of a baby {s}?"
        "|What's a baby {s} called?|How is a baby {s} called?|Name the baby of a {s}."
        "|What is the young of a {s} called?"
        "|What do people call a baby {s}?|Which name does a baby {s} have?"
        "|What is the word for a baby {s}?",
        "What do we call a baby {s}?|What name does a baby {s} have?"),
    _relation("legs", tables.LEGS, "A {s} has {o} legs.",
        "How many legs does a {s} have?|How many legs has a {s}?|How many legs does the {s} have?"
        "|What number of legs does a {s} have?|Count the legs of a {s}.|How many legs are on a {s}?"
        "|What is the number of legs that a {s} has?|How many legs can a {s} have?"
        "|A {s} has how many legs?",
        "What is the number of legs of a {s}?|How many legs would a {s} have?"),
    _relation("home", tables.HOMES, "A {s} lives in a {o}.",
        "Where does a {s} live?|What is the home of a {s}?|What is the home of a {s} called?"
        "|In what does a {s} live?|Name the home of a {s}.|What's the home of the {s}?"
        "|What place does a {s} live in?|Where is the home of a {s}?"
        "|In which home does a {s} live?",
        "Where do you find the home of a {s}?|What does a {s} live in?"),
    _relation("colour", tables.COLOURS, "The colour of {s} is {o}.",
        "What colour is {s}?|What color is {s}?|What is the colour of {s}?|Which colour is {s}?"
        "|What is the color of {s}?|Name the colour of {s}.|Which color has {s}?"
        "|Which colour does {s} have?|Tell me the colour of {s}.|What colour do you see on {s}?"
        "|Of what colour is {s}?",
        "What's the colour of {s}?|Which color is {s}?|What colour does {s} have?"),
    _relation("opposite", tables.OPPOSITES, "The opposite of {s} is {o}.",
        "What is the opposite of {s}?|What's the opposite of {s}?|Name the opposite of {s}."
        "|Which word is the opposite of {s}?|opposite of {s}|What word means the opposite of {s}?"
        "|I am looking for the opposite of {s}."
        "|Tell me the opposite of {s}.|Which word is opposite to {s}?"
        "|What would be the opposite of {s}?",
        "Give me the opposite of {s}.|Which word means the opposite of {s}?"),
    _relation("plural", tables.PLURALS, "The plural of {s} is {o}.",
        "What is the plural of {s}?|What's the plural of {s}?|What is the plural form of {s}?"
        "|Name the plural of {s}.|plural of {s}|Which word is the plural of {s}?"
        "|How do you write the plural of {s}?"
        "|What is {s} in the plural?|Tell me the plural of {s}.|Put the word {s} in the plural.",
        "Give me the plural of {s}.|What is the word {s} in the plural?"),
    _relation("past", tables.PAST, "The past tense of {s} is {o}.",
        "What is the past tense of {s}?|What's the past tense of {s}?|Name the past tense of {s}."
        "|past tense of {s}|What is the past tense of the verb {s}?|Put {s} in the past tense."
        "|Which word is the past tense of {s}?"
        "|What is {s} in the past tense?|Tell me the past tense of {s}."
        "|Put the verb {s} in the past tense.",
        "Give me the past tense of {s}.|What is the verb {s} in the past tense?"),
    _relation("symbol", tables.SYMBOLS, "The chemical symbol of {s} is {o}.",
        "What is the chemical symbol of {s}?|What is the chemical symbol for {s}?|symbol of {s}"
        "|What's the symbol for {s}?|Name the chemical symbol of {s}.|What is the symbol of {s}?"
        "|Which chemical symbol stands for {s}?"
        "|Which chemical symbol does {s} have?|Which symbol is used for {s}?"
        "|What symbol do chemists use for {s}?|Tell me the chemical symbol of {s}.",
        "Which symbol does {s} have?|What chemical symbol is used for {s}?"),
    _relation("day after", tables.NEXT_DAY, "The day after {s} is {o}.",
        "What day comes after {s}?|Which day comes after {s}?|What is the day after {s}?"
        "|Which day follows {s}?|Today is {s}. What day is tomorrow?|Name the day after {s}."
        "|Tell me the day after {s}.|What day is it after {s}?|What comes after {s}?"
        "|Which day is next after {s}?",
        "What day follows {s}?|Which day is after {s}?"),
    _relation("day before", tables.PREVIOUS_DAY, "The day before {s} is {o}.",
        "What day comes before {s}?|Which day comes before {s}?|What is the day before {s}?"
        "|Today is {s}. What day was yesterday?|Name the day before {s}.|What day precedes {s}?"
        "|Tell me the day before {s}.|What day is it before {s}?|What comes before {s}?"
        "|Which day was before {s}?",
        "Which day precedes {s}?|Which day is before {s}?"),
    _relation("month after", tables.NEXT_MONTH, "The month after {s} is {o}.",
        "What month comes after {s}?|Which month comes after {s}?|What is the month after {s}?"
        "|Which month follows {s}?|Name the month after {s}."
        "|Tell me the month after {s}.|What month is it after {s}?|What comes after {s}?"
        "|Which month is next after {s}?",
        "What month follows {s}?|Which month is after {s}?"),
    _relation("month days", tables.MONTH_DAYS, "{s} has {o} days.",
        "How many days does {s} have?|How many days are in {s}?|How many days has {s}?"
        "|What number of days does {s} have?|How long is {s} in days?"
        "|Tell me how many days {s} has.|What is the number of days of {s}?|{s} has how many days?",
        "How many days are there in {s}?|What is the number of days in {s}?"),
    _relation("sides", tables.SIDES, "A {s} has {o} sides.",
        "How many sides does a {s} have?|How many sides has a {s}?|Count the sides of a {s}."
        "|What number of sides does a {s} have?|How many sides are on a {s}?"
        "|A {s} has how many sides?|How many sides can a {s} have?"
        "|Tell me how many sides a {s} has.",
        "What is the number of sides of a {s}?|How many sides would a {s} have?"),
    _relation("hello", tables.HELLOS, "Hello in {s} is {o}!",
        "How do you say hello in {s}?|Say hello in {s}.|What is hello in {s}?"
        "|How do I say hello in {s}?|What is the word for hello in {s}?|hello in {s}"
        "|How do people say hello in {s}?|Can you say hello in {s}?|Tell me hello in {s}.",
        "How would you say hello in {s}?|What's hello in {s}?"),
    _relation("thanks", tables.THANKS, "Thank you in {s} is {o}.",
        "How do you say thank you in {s}?|Say thank you in {s}.|What is thank you in {s}?"
        "|How do I say thank you in {s}?|What is the word for thank you in {s}?"
        "|How do people say thank you in {s}?|Can you say thank you in {s}?"
        "|Tell me thank you in {s}.|thank you in {s}",
        "How would you say thank you in {s}?|What's thank you in {s}?"),
    _relation("emoji", tables.EMOJI, "Here is the {s} emoji: {o}",
        "Show me the {s} emoji.|What is the {s} emoji?|Send me a {s} emoji.|emoji of a {s}"
        "|Which emoji shows a {s}?|Give me the {s} emoji."
        "|Let me see the {s} emoji.|Can you show me the {s} emoji?|Tell me the {s} emoji."
        "|Can I get the {s} emoji?",
        "What's the {s} emoji?|Can I see the {s} emoji?"),
    _relation("currency", tables.CURRENCIES, "The currency of {s} is the {o}.",
        "What is the currency of {s}?|Which currency is used in {s}?|currency of {s}"
        "|What money is used in {s}?|What's the currency of {s}?|Name the currency of {s}."
        "|What currency does {s} have?|Tell me the currency of {s}."
        "|What currency do people use in {s}?|Which currency do you pay with in {s}?",
        "Which currency does {s} use?|Give me the currency of {s}."),
)  # fmt: skip
OPENINGS = (
    "Please tell me: ", "Can you tell me: ", "Quick question: ", "Hi! ", "Hello. ", "Question: ",
    "I have a question. ", "Tell me, ", "Do you know? ", "One more question: ", "OK. ", "And now: ",
)  # fmt: skip


def _articles(text: str) -> str:
    """Put ``an`` where a vowel follows."""
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)


@dataclass(frozen=True, slots=True)
class Fact:
    """One row of the table."""

    relation: Relation
    subject: str
    answer: str

    def sentence(self) -> str:
        """The fact as the model is to say it."""
        text = _articles(self.relation.answer.format(s=self.subject, o=self.answer))
        return text[0].upper() + text[1:]

    def ask(self, wording: str) -> str:
        """The fact asked for in one wording."""
        return _articles(wording.format(s=self.subject))


FACTS = tuple(
    Fact(relation, subject, answer) for relation in RELATIONS for subject, answer in tables.rows(relation.table)
)


def exchange(rng: random.Random) -> Exchange:
    """A fact asked in a wording of the training part."""
    fact = rng.choice(FACTS)
    text = fact.ask(rng.choice(fact.relation.wordings))
    if rng.random() < 0.25:
        text = rng.choice(OPENINGS) + text
    if rng.random() < 0.08:
        text = text.lower()
    if rng.random() < 0.08:
        text = text.rstrip("?.")
    return Exchange(text, fact.sentence(), 1.5)


def drill(rng: random.Random) -> list[Piece]:
    """A page of facts as plain sentences, so that they are known outside a chat as well."""
    text = " ".join(fact.sentence() for fact in rng.sample(FACTS, rng.randint(4, 16)))
    return [Piece(text, 0.7)]


def evaluation(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Facts in held-out wordings with the sentences expected; ``count`` 0 asks everything once."""
    cases = [(f.ask(w), f.sentence()) for f in FACTS for w in f.relation.held_out]
    return rng.sample(cases, count) if count else cases
