"""The grammar of questions: frames around the phrases of a relation, and what may stand around both.

A part of it never reaches the training text, so that the evaluation can distinguish three kinds of
novelty: new pairs of known frames and phrases, unknown frames, and unknown phrases. Unknown phrases
are divided again into those with a word that training never shows and those without.
"""

import random
import re
import zlib
from dataclasses import dataclass
from functools import cache

from troupellm.training import wordings_everyday, wordings_facts as texts

COMBINATIONS = 12  # one combination in so many is held out
KINDS = ("noun", "question", "clause", "other")
SHARES = (0.26, 0.24, 0.12, 0.38)
FRAMES = (texts.NOUN_FRAMES, texts.QUESTION_FRAMES, texts.CLAUSE_FRAMES, texts.OTHER_FRAMES)
PARTS = ("training", "combinations", "openers", "phrases")


@dataclass(frozen=True, slots=True)
class Core:
    """A question with the subject open, and the part of the data it belongs to."""

    kind: str
    frame: str
    phrase: str
    part: str

    @property
    def text(self) -> str:
        """The question; ``{s}`` stands for the subject."""
        made = self.frame.replace("{x}", self.phrase)
        return made[0].upper() + made[1:] if self.frame != "{x}" or self.kind == "other" else made


def split(listed: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The entries for training, and those held out."""
    entries = listed.split("|")
    return tuple(e for e in entries if e[0] != "*"), tuple(e[1:] for e in entries if e[0] == "*")


def _apart(frame: str, phrase: str) -> bool:
    """True if a pair is held out; depends on its text alone, as other pairs may give the same text."""
    if frame.startswith("{x}"):
        return False
    text = frame.replace("{x}", phrase).lower().rstrip("?.")
    return zlib.crc32(text.encode()) % COMBINATIONS == 0


def phrases_of(relation: str) -> tuple[str, str, str, str]:
    """The phrases of every kind; everyday sentences stand by themselves, so they are of the last."""
    *framed, others = texts.PHRASES[relation]
    noun, question, clause = framed
    return noun, question, clause, f"{others}|{wordings_everyday.SENTENCES[relation]}"


@cache
def cores(relation: str, part: str) -> dict[str, tuple[Core, ...]]:
    """All questions about a relation that belong to one part, by kind."""
    out: dict[str, tuple[Core, ...]] = {}
    for kind, frame_list, phrase_list in zip(KINDS, FRAMES, phrases_of(relation), strict=True):
        frames, new_frames = split(frame_list)
        phrases, new_phrases = split(phrase_list)
        pairs = [(frame, phrase) for frame in frames for phrase in phrases]
        if part == "training":
            pairs = [pair for pair in pairs if not _apart(*pair)]
        elif part == "combinations":
            pairs = [pair for pair in pairs if _apart(*pair)]
        elif part == "openers":
            pairs = [(frame, phrase) for frame in new_frames for phrase in phrases]
        else:
            pairs = [(frame, phrase) for frame in dict.fromkeys(frames) for phrase in new_phrases]
        if pairs:
            out[kind] = tuple(Core(kind, frame, phrase, part) for frame, phrase in pairs)
    return out


@cache
def vocabulary() -> frozenset[str]:
    """Every word of the grammar's training part, of all relations."""
    return frozenset(word for relation in texts.PHRASES for core in _all(relation, "training") for word in _words(core))


def has_new_word(core: Core) -> bool:
    """True if a question uses a word that no training question has, so that the model can only guess."""
    return not _words(core) <= vocabulary()


def _all(relation: str, part: str) -> list[Core]:
    return [core for group in cores(relation, part).values() for core in group]


def _words(core: Core) -> set[str]:
    return set(re.findall(r"[a-z']+", core.text.replace("{s}", " ").lower()))


def draw(rng: random.Random, relation: str, part: str = "training") -> Core:
    """One question about a relation."""
    choices = cores(relation, part)
    shares = [SHARES[KINDS.index(kind)] for kind in choices]
    return rng.choice(choices[rng.choices(list(choices), shares)[0]])


def dress(rng: random.Random, text: str) -> str:
    """A question as people type it: with something before or after it, casually written or not."""
    if rng.random() < 0.25:
        text = rng.choice(split(texts.PREFIXES)[0]) + text
    if rng.random() < 0.12 and text[-1] in ".?!":
        text += rng.choice(split(texts.SUFFIXES)[0])
    elif rng.random() < 0.15:
        text = text.rstrip("?.")
    style = rng.random()
    if style < 0.12:
        return text.lower()
    if style < 0.14:
        return text.upper()
    if style < 0.17:
        return text.replace("'", "’").replace("?", " ?")
    return text
