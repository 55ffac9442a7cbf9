"""Questions over the fixed table of facts, in wordings of the grammar of ``wordings.py``."""

import random
import re
from dataclasses import dataclass

from troupellm.training import fact_tables as tables, wordings, wordings_facts as texts, wordings_noise
from troupellm.training.documents import Exchange, Piece


@dataclass(frozen=True, slots=True)
class Relation:
    """One relation of the table; ``{s}`` is the subject, ``{o}`` the answer."""

    name: str
    table: str
    answer: str


RELATIONS = (
    Relation("capital", tables.CAPITALS, "The capital of {s} is {o}."),
    Relation("continent", tables.CONTINENTS, "{s} is in {o}."),
    Relation("sound", tables.SOUNDS, "The {s} says {o}."),
    Relation("baby", tables.BABIES, "A baby {s} is called a {o}."),
    Relation("legs", tables.LEGS, "A {s} has {o} legs."),
    Relation("home", tables.HOMES, "A {s} lives in a {o}."),
    Relation("colour", tables.COLOURS, "The colour of {s} is {o}."),
    Relation("opposite", tables.OPPOSITES, "The opposite of {s} is {o}."),
    Relation("plural", tables.PLURALS, "The plural of {s} is {o}."),
    Relation("past", tables.PAST, "The past tense of {s} is {o}."),
    Relation("symbol", tables.SYMBOLS, "The chemical symbol of {s} is {o}."),
    Relation("day after", tables.NEXT_DAY, "The day after {s} is {o}."),
    Relation("day before", tables.PREVIOUS_DAY, "The day before {s} is {o}."),
    Relation("month after", tables.NEXT_MONTH, "The month after {s} is {o}."),
    Relation("month days", tables.MONTH_DAYS, "{s} has {o} days."),
    Relation("sides", tables.SIDES, "A {s} has {o} sides."),
    Relation("hello", tables.HELLOS, "Hello in {s} is {o}!"),
    Relation("thanks", tables.THANKS, "Thank you in {s} is {o}."),
    Relation("emoji", tables.EMOJI, "Here is the {s} emoji: {o}"),
    Relation("currency", tables.CURRENCIES, "The currency of {s} is the {o}."),
)


def articles(text: str) -> str:
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
        text = articles(self.relation.answer.format(s=self.subject, o=self.answer))
        return text[0].upper() + text[1:]

    def ask(self, wording: str) -> str:
        """The fact asked for in one wording."""
        text = articles(wording.format(s=self.subject))
        return text[0].upper() + text[1:] if wording.startswith("{s} ") and wording[-1] in ".?" else text

    def mention(self) -> str:
        """The subject as a follow-up names it."""
        return articles(texts.MENTIONS.get(self.relation.name, "{s}").format(s=self.subject))


FACTS = tuple(
    Fact(relation, subject, answer) for relation in RELATIONS for subject, answer in tables.rows(relation.table)
)
BY_RELATION = {relation.name: [fact for fact in FACTS if fact.relation is relation] for relation in RELATIONS}


def draw(rng: random.Random) -> Fact:
    """A fact; relations of few rows come up more often than their share."""
    return rng.choice(FACTS) if rng.random() < 0.6 else rng.choice(BY_RELATION[rng.choice(RELATIONS).name])


def exchange(rng: random.Random) -> Exchange:
    """A fact asked in a wording of the training part."""
    fact = draw(rng)
    return Exchange(question(rng, fact), fact.sentence(), 1.5)


def question(rng: random.Random, fact: Fact) -> str:
    """A fact asked for as training sees it: tidy or loose."""
    text = fact.ask(wordings.draw(rng, fact.relation.name).text)
    if rng.random() < wordings_noise.SHARE:
        text = wordings_noise.loosen(rng, fact.relation.name, text, fact.subject)
    return wordings.dress(rng, text)


def dialogue(rng: random.Random) -> list[Exchange]:
    """A question and follow-ups that name only another subject."""
    first = draw(rng)
    others = [fact for fact in BY_RELATION[first.relation.name] if fact is not first]
    out = [Exchange(question(rng, first), first.sentence(), 1.5)]
    for fact in rng.sample(others, rng.randint(1, 4)):
        frame = rng.choice(wordings.split(texts.FOLLOW_UPS)[0])
        out.append(Exchange(frame.replace("{x}", fact.mention()), fact.sentence(), 1.5))
    return out


def drill(rng: random.Random) -> list[Piece]:
    """A page of facts as plain sentences, so that they are known outside a chat as well."""
    text = " ".join(fact.sentence() for fact in rng.sample(FACTS, rng.randint(4, 16)))
    return [Piece(text, 0.7)]


def evaluation(rng: random.Random, part: str, count: int, *, new_words: bool = False) -> list[tuple[str, str]]:
    """Held-out questions with the sentences expected; ``count`` 0 asks for every fact twice.

    ``new_words`` chooses the questions with a word that training never shows, otherwise they have none.
    """
    out: list[tuple[str, str]] = []
    wanted = count or 2 * len(FACTS)
    while len(out) < wanted:
        for fact in rng.sample(FACTS, len(FACTS)):
            core = wordings.draw(rng, fact.relation.name, part)
            if part != "phrases" or wordings.has_new_word(core) == new_words:
                out.append((fact.ask(core.text), fact.sentence()))
    return out[:wanted]
