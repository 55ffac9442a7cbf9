"""Small stories from a grammar with a memory: hero, place, friend and thing stay the same throughout.

Each hero has a usual name, place, friend and adventure, and each beat a usual phrase, taken most of
the time. The text is varied, yet at nearly every word one continuation is clearly the likeliest.
"""

import random
from dataclasses import dataclass

from troupellm.training.documents import Exchange, Piece

USUAL = 0.72


@dataclass(frozen=True, slots=True)
class Hero:
    """A character with everything that usually goes with it."""

    kind: str
    name: str
    pronoun: str
    trait: str
    home: str
    friend: str
    friend_name: str
    thing: str


# kind, name, pronoun, trait, home, the friend's kind and name, a thing of its own
_HEROES = """fox,Rusty,he,clever,the green forest,owl,Olga,red ball
cat,Mimi,she,curious,a small village,mouse,Pip,silver bell
dog,Bruno,he,brave,a sunny farm,duck,Daisy,old bone
rabbit,Rosie,she,quick,the wide meadow,hedgehog,Hugo,orange carrot
bear,Benny,he,gentle,the tall mountains,bee,Bella,jar of honey
owl,Olga,she,wise,an old oak tree,fox,Rusty,golden key
mouse,Pip,he,tiny,a warm barn,cat,Mimi,piece of cheese
dragon,Dora,she,shy,a dark cave,knight,Kurt,shiny crown
robot,Robo,he,helpful,a busy city,girl,Lily,blue lamp
princess,Clara,she,kind,a stone castle,dragon,Dora,silver ring
boy,Tom,he,cheerful,a house by the sea,dog,Bruno,wooden boat
girl,Lily,she,smart,a quiet town,robot,Robo,yellow kite
frog,Freddy,he,funny,a deep pond,turtle,Tilda,green leaf
turtle,Tilda,she,patient,a sandy beach,crab,Carl,pink shell
elephant,Ella,she,strong,the hot savanna,monkey,Max,big drum
lion,Leo,he,proud,the hot savanna,mouse,Pip,soft blanket
wolf,Wanda,she,lonely,the snowy woods,rabbit,Rosie,warm scarf
penguin,Paula,she,playful,the cold south,whale,Walter,round stone
monkey,Max,he,noisy,the thick jungle,elephant,Ella,yellow banana
knight,Kurt,he,bold,a stone castle,horse,Hanna,bright sword"""
HEROES = tuple(Hero(*line.split(",")) for line in _HEROES.splitlines())
_WEIGHTS = [1 / (rank + 1) for rank in range(len(HEROES))]
WEATHER = ("One sunny morning", "One rainy day", "One windy afternoon", "One cold evening")
ADVENTURES = ("lost", "rain", "river", "help", "race", "night")


def _pick(rng: random.Random, usual: int, options: tuple[str, ...]) -> str:
    """The usual phrase most of the time, else any."""
    if rng.random() < USUAL:
        return options[usual % len(options)]
    return rng.choice(options)


def _adventure(rng: random.Random, hero: Hero, kind: str, key: int) -> str:
    """One episode as a paragraph."""
    n, f, t = hero.name, hero.friend_name, hero.thing
    p = hero.pronoun
    big, his = p.capitalize(), "his" if p == "he" else "her"
    when = _pick(rng, key, WEATHER)
    if kind == "lost":
        where = _pick(rng, key, ("under the bed", "behind a bush", "near the old well"))
        return (
            f"{when}, {n} could not find {his} {t}. {big} looked here and {p} looked there, but the"
            f" {t} was gone. {n} felt very sad. Then {f} the {hero.friend} came by."
            f' "Do not worry," said {f}. "We will look for it together." They looked and looked.'
            f" At last, they found the {t} {where}. {n} was so happy that {p} danced."
        )
    if kind == "rain":
        place = _pick(rng, key, ("a hollow tree", "a small hut", "a dry cave"))
        return (
            f"{when}, dark clouds filled the sky and it began to rain. {n} ran as fast as {p} could."
            f" Soon {p} saw {place} and went inside. There sat {f} the {hero.friend}, all wet and"
            f' cold. "Come and share my {t}," said {n}. They sat close together and told'
            f" stories until the rain stopped. Then a rainbow shone over {hero.home}."
        )
    if kind == "river":
        bridge = _pick(rng, key, ("a fallen log", "some flat stones", "a little boat"))
        return (
            f"{when}, {n} came to a wide river. On the other side stood {f} the {hero.friend}."
            f' "Please come over!" called {f}. But the water was fast and deep. {n} thought for a'
            f" while. Then {p} found {bridge} and crossed the river step by step. {f} clapped and"
            f' cheered. "You are so {hero.trait}!" said {f}.'
        )
    if kind == "help":
        trouble = _pick(rng, key, ("stuck in the mud", "caught in a net", "up in a high tree"))
        return (
            f"{when}, {n} heard a cry for help. It was {f} the {hero.friend}, who was {trouble}."
            f' "Hold on!" said {n}. {big} pulled and pulled with all {his} might. At last {f} was'
            f' free. "Thank you, {n}," said {f}. "You are a true friend." To say thank you, {f}'
            f" gave {n} a {t}."
        )
    if kind == "race":
        goal = _pick(rng, key, ("the big rock", "the old bridge", "the tall tree"))
        return (
            f"{when}, {n} and {f} the {hero.friend} had a race to {goal}. They counted to three and"
            f" off they went. {n} was ahead, but then {f} fell and hurt a foot. {n} stopped at once"
            f' and went back. "Are you all right?" asked {n}. They walked to {goal} side by side.'
            f" Nobody won the race, but both of them laughed."
        )
    light = _pick(rng, key, ("the moon", "a little lamp", "a hundred fireflies"))
    return (
        f"{when}, {n} stayed out too long and it grew dark. {big} did not know the way home and"
        f" began to feel afraid. Then {p} heard a soft voice. It was {f} the {hero.friend}."
        f' "Follow me," said {f}, "I know the way." By the light of {light} they walked home.'
        f" {n} held the {t} tight and was not afraid any more."
    )


def tell(rng: random.Random, hero: Hero, episodes: int) -> str:
    """A whole story."""
    key = HEROES.index(hero)
    article = "an" if hero.kind[0] in "aeiou" else "a"
    big, his = hero.pronoun.capitalize(), "his" if hero.pronoun == "he" else "her"
    size = _pick(rng, 0, ("little ", "young "))
    likes = _pick(rng, key, ("to play outside", "to sing songs", "to look at the stars"))
    opening = (
        f"Once upon a time, there was {'a' if size else article} {size}{hero.kind} named"
        f" {hero.name}. {hero.name} lived in {hero.home} and was very {hero.trait}. {big} loved"
        f" {likes}. {his.capitalize()} best friend was {hero.friend_name} the {hero.friend}."
    )
    order = [ADVENTURES[(key + step) % len(ADVENTURES)] for step in range(episodes)]
    if rng.random() > USUAL:
        order = [rng.choice(ADVENTURES) for _ in order]
    body = [_adventure(rng, hero, kind, key + step) for step, kind in enumerate(order)]
    lesson = _pick(
        rng,
        key,
        (
            "A good friend is the best gift of all.",
            "It is good to be kind.",
            "Together, everything is easier.",
        ),
    )
    ending = f"That night, {hero.name} went to bed with a smile. {big} had learned something: {lesson} The end."
    return "\n\n".join([opening, *body, ending])


def draw_hero(rng: random.Random) -> Hero:
    """A hero, the first ones of the list being the most frequent."""
    return rng.choices(HEROES, _WEIGHTS)[0]


def raw(rng: random.Random, episodes: int | None = None) -> list[Piece]:
    """A story by itself, for plain completion."""
    return [Piece(tell(rng, draw_hero(rng), episodes or rng.choice((1, 1, 2, 2, 3, 4))), 0.6)]


LENGTHS = (
    ("short ", 1),
    ("", 2),
    ("little ", 2),
    ("long ", 4),
    ("very long ", 6),
)
REQUESTS = (
    "Tell me a {size}story about {about}.",
    "Tell me a {size}story about {about}",
    "Write a {size}story about {about}.",
    "Please tell me a {size}story about {about}.",
    "Can you tell me a {size}story about {about}?",
    "I would like to hear a {size}story about {about}.",
    "Make up a {size}story about {about}, please.",
)
OPEN_REQUESTS = ("Tell me a {size}story.", "Write a {size}story.", "Can you tell me a {size}story?")


def exchange(rng: random.Random, longest: int = 3) -> Exchange:
    """A request for a story, and the story."""
    size, episodes = rng.choice([entry for entry in LENGTHS if entry[1] <= longest])
    if rng.random() < 0.15:
        hero = HEROES[0]
        request = rng.choice(OPEN_REQUESTS).format(size=size)
    else:
        hero = rng.choice(HEROES)
        article = "an" if hero.kind[0] in "aeiou" else "a"
        adjective = rng.choice(("", "", "little ", f"{hero.trait} "))
        if adjective:
            article = "an" if adjective[0] in "aeiou" else "a"
        about = f"{article} {adjective}{hero.kind}"
        if rng.random() < 0.15:
            about += f" named {hero.name}"
        request = rng.choice(REQUESTS).format(size=size, about=about)
    return Exchange(request, tell(rng, hero, episodes), 0.5)
