"""Questions loosened: small words dropped, swapped or put in, and a remark before them.

The grammar's questions are tidy, people's are not. A few words of a question say which fact it asks
for; a model that has seen the others in every order learns to read those. No wording that the grammar
holds out is made here by accident.
"""

import random
import zlib
from functools import cache

from troupellm.training import wordings

SHARE = 0.35
# None of them tells one relation from another.
_SMALL = """what what's which is are was the a an of does do did you i me we my your it its that this to can could would
    please tell name give have has know like about called one there so and be by if for with on as want need
    people someone somebody"""
_FILLERS = """what which is the a of does do you i me we my your it its that this to can could would please tell there
    so and be if for with on as just really actually maybe then now right again exactly usually well also simply only
    ever kind sort one when will should might shall us they he she was are am um like anyway correctly
    properly always normally mostly"""
SMALL = frozenset(_SMALL.split())
FILLERS = _FILLERS.split()
WHO = ("I", "We", "My friend", "My sister", "My brother", "Our teacher", "My father", "A colleague", "Somebody", "They")
DID = (
    "read about it in a book", "did some homework", "worked on a quiz", "talked about this", "saw a picture of it",
    "played a game", "went for a walk", "travelled a lot", "watched a film about it", "learned it at school",
    "wrote a letter", "painted a picture", "looked at a map", "forgot the answer", "asked this question",
    "planned a holiday", "bought a dictionary", "visited the zoo", "studied for a test", "had an argument about it",
)  # fmt: skip
WHEN = ("", " yesterday", " this morning", " last week", " today", " once", " a while ago", " just now", " last summer")


def loosen(rng: random.Random, relation: str, text: str, subject: str) -> str:
    """A looser form of a question; the question itself where the looser one is held out or hardly differs."""
    kept = {word.lower().strip("?.,!:") for word in subject.split()}
    rate = rng.choice((0.1, 0.25, 0.5, 0.9))
    out: list[str] = []
    for word in text.split():
        bare = word.lower().strip("?.,!:")
        if bare in SMALL and bare not in kept and rng.random() < rate:
            if rng.random() < 0.4:
                out.append(rng.choice(FILLERS))
            continue
        inside = bare in kept and bool(out) and out[-1].lower() in kept  # a subject of two words stays whole
        if not inside and rng.random() < 0.25 * min(rate, 0.4):
            out.append(rng.choice(FILLERS))
        out.append(word)
    made = " ".join(out)
    if rng.random() < 0.25:
        made = (
            f"{rng.choice(WHO)} {rng.choice(DID)}{rng.choice(WHEN)}{rng.choice(('.', ',', ' and', ' so', '!'))} {made}"
        )
    if not made or is_held_out(relation, made, subject):
        return text
    return made[0].upper() + made[1:] if rng.random() < 0.7 else made


def is_held_out(relation: str, text: str, subject: str) -> bool:
    """True if a text contains an opener, a phrase or a combination that training must not see."""
    plain = _plain(text).replace(_plain(subject), "{s}")
    phrases, openers = _held(relation)
    if any(phrase in plain for phrase in phrases) or any(opener in plain for opener in openers):
        return True
    return zlib.crc32(plain.encode()) % wordings.COMBINATIONS == 0


def _plain(text: str) -> str:
    return " ".join(text.lower().replace(" an ", " a ").split()).rstrip("?.!, ")


@cache
def _held(relation: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Held-out phrases of a relation, and the words with which held-out openers begin."""
    phrases = [phrase for listed in wordings.phrases_of(relation) for phrase in wordings.split(listed)[1]]
    frames = [frame for listed in wordings.FRAMES for frame in wordings.split(listed)[1]]
    openers = [frame.split("{x}")[0] for frame in frames]
    return tuple(_plain(phrase) for phrase in phrases), tuple(_plain(opener) for opener in openers if opener.strip())
