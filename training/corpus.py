"""The mixture: which document comes next, and the stream of documents a seed stands for."""

import json
import random
from collections.abc import Callable, Iterator

from troupellm.load_tests.speculation import words
from troupellm.training import arithmetic, dialogue, facts, json_objects, made_up, stories, tool_calls
from troupellm.training.documents import Chat, Exchange, Piece

Make = Callable[[random.Random], list[Piece]]
TEXTS = (
    "Élodie naïvely ate crème brûlée at the café. ☕",
    "Das Mädchen trinkt Tee. Der Fuchs schläft.",
    "El niño come una manzana. ¡Qué bueno!",
    "猫は小さいです。犬は大きいです。",
    "我喜欢猫。你好，世界！",
    "Привет, мир! Кот спит.",
    "안녕하세요. 고양이가 잡니다.",
    "Γειά σου, κόσμε!",
    "مرحبا بالعالم",
    "שלום עולם",
    "😀 😁 😂 🤖 🎉 🚀 👍 🙏 💡 🔥",
    "x² + y² = z², π ≈ 3.14, 10 €, 5 £, 20 °C, “quoted” – dash — ellipsis…",
    "def add(a, b):\n    return a + b\n",
    "<ul>\n  <li>one</li>\n  <li>two</li>\n</ul>\n",
)


def single(rng: random.Random) -> list[Piece]:
    """One question, one answer."""
    return _conversation(rng, 1)


def several(rng: random.Random) -> list[Piece]:
    """A conversation that wanders from subject to subject."""
    return _conversation(rng, rng.randint(2, 8))


def _conversation(rng: random.Random, turns: int) -> list[Piece]:
    out = Chat()
    if rng.random() < 0.3:
        out.system = rng.choice(dialogue.SYSTEMS)
    for turn in range(turns):
        if turns > 1 and rng.random() < 0.25:
            for asked in facts.dialogue(rng):
                out.ask(asked)
        else:
            out.ask(_exchange(rng, first=turn == 0))
    return out.pieces()


def _exchange(rng: random.Random, *, first: bool) -> Exchange:
    draw = rng.random()
    if draw < 0.50:
        return facts.exchange(rng)
    if draw < 0.82:
        return arithmetic.exchange(rng)
    if draw < (0.96 if first else 0.98):
        return dialogue.exchange(rng)
    return stories.exchange(rng, 2)


def story_chat(rng: random.Random) -> list[Piece]:
    """A story on request."""
    out = Chat()
    if rng.random() < 0.3:
        out.system = rng.choice(dialogue.SYSTEMS)
    out.ask(stories.exchange(rng, 6 if rng.random() < 0.15 else 2))
    return out.pieces()


def reading(rng: random.Random, episodes: int = 1) -> list[Piece]:
    """A question about a text given before it, in the question or in the system turn."""
    hero = stories.draw_hero(rng)
    name, city = rng.choice(words.NAMES), rng.choice(words.CITIES)
    note = f"{name} lives in {city}."
    story = stories.tell(rng, hero, rng.randint(1, episodes))
    text = f"{note}\n\n{story}" if rng.random() < 0.5 else f"{story}\n\n{note}"
    question, answer = rng.choice(
        (
            (f"Where does {name} live?", f"{name} lives in {city}."),
            (f"Who lives in {city}?", f"{name} lives in {city}."),
            (f"What is the name of the {hero.kind}?", f"The {hero.kind} is named {hero.name}."),
        )
    )
    out = Chat()
    if rng.random() < 0.5:
        out.system = text
        out.ask(Exchange(question, answer))
    else:
        out.ask(Exchange(f"{text}\n\n{question}", answer))
    return out.pieces()


def objects(rng: random.Random) -> list[Piece]:
    """A JSON object on request."""
    return json_objects.chat(rng)[0].pieces()


def calls(rng: random.Random) -> list[Piece]:
    """A conversation with tools; half the time with tools whose names can only be copied."""
    if rng.random() < 0.5:
        return tool_calls.strange_chat(rng)[0].pieces()
    return tool_calls.chat(rng)[0].pieces()


def copying(rng: random.Random) -> list[Piece]:
    """Words and made-up words to say again or to look up: the skill behind JSON and tool calls."""
    out = Chat()
    pool = words.WORDS + words.NAMES + words.CITIES + words.ITEMS + words.ANIMALS
    for _ in range(rng.randint(1, 4)):
        size = rng.randint(2, 8)
        keys = [made_up.identifier(rng) if rng.random() < 0.5 else rng.choice(pool) for _ in range(size)]
        if rng.random() < 0.5:
            listed = rng.choice((", ", " ", "\n")).join(keys)
            out.ask(Exchange(f"{rng.choice(('Repeat', 'Copy', 'Say'))}: {listed}", listed))
            continue
        values = [str(rng.randint(1, 99)) if rng.random() < 0.3 else rng.choice(pool) for _ in keys]
        table = dict(zip(keys, values, strict=True))
        shown = json.dumps(table, ensure_ascii=False)
        if rng.random() < 0.5:
            shown = "\n".join(f"{key}: {value}" for key, value in table.items())
        key = rng.choice(keys)
        if rng.random() < 0.3:
            answer = json.dumps(table, ensure_ascii=False)
            out.ask(Exchange(f"{shown}\nWrite this as JSON.", answer))
        else:
            answer = json.dumps({key: table[key]}, ensure_ascii=False)
            out.ask(Exchange(f"{shown}\nGive me only {key} as JSON.", answer))
    return out.pieces()


def calculating(rng: random.Random) -> list[Piece]:
    """Nothing but sums and differences, asked one after another."""
    out = Chat()
    if rng.random() < 0.3:
        out.system = rng.choice(dialogue.SYSTEMS)
    for _ in range(rng.randint(1, 6)):
        out.ask(arithmetic.exchange(rng))
    return out.pieces()


def foreign(rng: random.Random) -> list[Piece]:
    """A few lines that need bytes outside ASCII."""
    return [Piece("\n".join(rng.sample(TEXTS, 3)), 0.2)]


def counting(rng: random.Random) -> list[Piece]:
    """Counting alone: where to stop stands in the question."""
    out = Chat()
    for _ in range(rng.randint(1, 3)):
        out.ask(dialogue.counting(rng))
    return out.pieces()


# Shares of documents, not of tokens, in the first and the second stage of a run from nothing: first the facts and
# the forms, then more of what stays weak longest. The third is for runs that go on from finished weights to mend
# their sums: everything else in it is there to be kept. A story is ten times as long as a sum.
MIXTURE: tuple[tuple[Make, float, float, float], ...] = (
    (single, 0.31, 0.24, 0.22),
    (several, 0.13, 0.10, 0.10),
    (arithmetic.drill, 0.10, 0.07, 0.16),
    (facts.drill, 0.04, 0.01, 0.01),
    (stories.raw, 0.02, 0.01, 0.01),
    (story_chat, 0.04, 0.03, 0.03),
    (objects, 0.16, 0.25, 0.19),
    (calls, 0.09, 0.16, 0.13),
    (reading, 0.02, 0.02, 0.02),
    (copying, 0.06, 0.08, 0.05),
    (counting, 0.02, 0.02, 0.02),
    (foreign, 0.01, 0.01, 0.01),
    (calculating, 0.0, 0.0, 0.05),
)
CONTINUED = 2
"""The stage of a run that goes on from finished weights."""


def documents(seed: int | str, stage: int = 0) -> Iterator[list[Piece]]:
    """The endless stream of documents of a seed and a stage (0, 1, `CONTINUED`); the same ones give the same stream."""
    rng = random.Random(seed)
    makers = [make for make, *_ in MIXTURE]
    shares = [both[stage] for _, *both in MIXTURE]
    while True:
        yield rng.choices(makers, shares)[0](rng)


def long_documents(seed: int | str, length: int) -> Iterator[list[Piece]]:
    """Documents of about ``length`` characters each: one long conversation, sometimes a reading."""
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.3:
            yield reading(rng, max(1, length // 600))
            continue
        out = Chat(system=rng.choice(dialogue.SYSTEMS) if rng.random() < 0.5 else None)
        size = 0
        while size < length:
            draw = rng.random()
            made = stories.exchange(rng, 4) if draw < 0.12 else _exchange(rng, first=False)
            out.ask(made)
            size += len(made.user) + len(made.assistant) + 50
        yield out.pieces()
