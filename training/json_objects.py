"""JSON objects for a simple schema: made up from the schema alone, or read out of a sentence."""

import json
import random
from typing import Any

from troupellm.load_tests.speculation import words
from troupellm.training import made_up
from troupellm.training.documents import Chat

USUAL = 0.75
Schema = dict[str, Any]
STRINGS: dict[str, tuple[str, ...]] = {
    "name": words.NAMES, "city": words.CITIES, "colour": words.COLOURS, "color": words.COLOURS,
    "day": words.DAYS, "item": words.ITEMS, "animal": words.ANIMALS, "job": words.JOBS,
    "food": words.FOODS, "title": ("The Red Fox", "The Old Tree", "A Long Day"),
    "country": ("France", "Japan", "Kenya", "Brazil", "Canada"), "friend": words.NAMES[::-1],
    "email": ("anna@example.com", "ben@example.com"), "first_name": words.NAMES,
    "last_name": ("Smith", "Miller", "Brown", "Fischer"), "language": ("English", "French"),
    "description": ("A small red ball.", "A nice day."), "message": ("Hello!", "Good morning!"),
    "product": words.ITEMS, "location": words.CITIES, "status": ("active", "open", "done"),
    "answer": ("yes", "no"), "question": ("How are you?", "What is this?"),
    "summary": ("A fox finds a friend.", "All is well."), "text": ("Hello!", "All is well."),
}  # fmt: skip
INTEGERS: dict[str, tuple[int, int, int]] = {
    "age": (30, 1, 99), "year": (2024, 1950, 2030), "count": (3, 0, 50), "price": (10, 1, 99),
    "score": (7, 0, 10), "quantity": (2, 1, 20), "hour": (9, 0, 23), "id": (1, 1, 999),
    "size": (5, 1, 60), "number": (4, 0, 99), "floor": (2, 0, 30), "rating": (5, 1, 5),
    "temperature": (20, 0, 40), "legs": (4, 0, 10), "minutes": (15, 1, 90), "total": (12, 0, 99),
}  # fmt: skip
BOOLEANS = ("active", "happy", "open", "is_new", "available", "married", "student", "done", "paid",
            "in_stock", "is_admin", "friendly", "valid", "urgent", "vegetarian", "ok")  # fmt: skip
ENUMS: dict[str, tuple[str, ...]] = {
    "size": ("small", "medium", "large"), "colour": ("red", "green", "blue"),
    "color": ("red", "green", "blue"), "mood": ("happy", "sad", "angry", "calm"),
    "unit": ("celsius", "fahrenheit"), "level": ("low", "middle", "high"),
    "kind": ("cat", "dog", "bird"), "weather": ("sunny", "rainy", "cloudy"),
    "sentiment": ("positive", "negative", "neutral"), "status": ("open", "closed"),
    "priority": ("low", "normal", "high"), "answer": ("yes", "no", "maybe"),
}  # fmt: skip
SUBJECTS = ("a person", "a user", "a product", "an animal", "a pet", "an order", "a friend",
            "something", "an event", "an item", "a place", "a customer")  # fmt: skip
REQUESTS = (
    "Return a JSON object that matches this schema: {schema}",
    "Give me a JSON object for this schema: {schema}",
    "Write JSON that matches this schema:\n{schema}",
    "Make up {subject} as JSON with this schema: {schema}",
    "Describe {subject}. Answer in JSON with this schema: {schema}",
    "Generate {subject} as a JSON object. Schema: {schema}",
    "{schema}\nAnswer with a JSON object that matches the schema.",
)
SYSTEMS = (
    "Answer only with a JSON object that matches this schema: {schema}",
    "You answer in JSON. Schema: {schema}",
    "Reply with JSON that matches this schema:\n{schema}",
)
SHORT_REQUESTS = ("Describe {subject}.", "Make up {subject}.", "Give me {subject} as JSON.",
                  "Generate {subject}.", "Create {subject}.")  # fmt: skip
KEY_REQUESTS = ("Give me a JSON object with the keys {keys}.", "Give me JSON with {keys}.",
                "Make a JSON object with the fields {keys}.")  # fmt: skip


def _usually(rng: random.Random, options: tuple[str, ...]) -> str:
    return options[0] if rng.random() < USUAL else rng.choice(options)


def draw_field(rng: random.Random, foreign: float) -> tuple[str, Schema, Any]:
    """A field: its name, its schema and a value that satisfies it; ``foreign`` is the share of made-up names."""
    kind = rng.random()
    strange = made_up.identifier(rng) if rng.random() < foreign else None
    if kind < 0.3:
        name = strange or rng.choice(tuple(STRINGS))
        return name, {"type": "string"}, _usually(rng, STRINGS.get(name, (name,)))
    if kind < 0.54:
        name = strange or rng.choice(tuple(INTEGERS))
        return name, *_number(rng, name)
    if kind < 0.72:
        return strange or rng.choice(BOOLEANS), {"type": "boolean"}, rng.random() < 0.9
    if kind < 0.96:
        name = strange or rng.choice(tuple(ENUMS))
        options = list(ENUMS.get(name, ("small", "large")))
        if strange or rng.random() < 0.5:
            options = [
                made_up.word(rng) if rng.random() < 0.3 else option
                for option in rng.sample(words.WORDS, rng.randint(2, 4))
            ]
        rng.shuffle(options)
        return name, {"type": "string", "enum": options}, options[0]
    return strange or rng.choice(("price", "weight", "height", "amount")), {"type": "number"}, 1.5


def _number(rng: random.Random, name: str) -> tuple[Schema, int]:
    usual, low, high = INTEGERS.get(name, (1, 0, 99))
    if rng.random() < 0.35:
        low = rng.randint(0, 90)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(1, 60)}, low
    return {"type": "integer"}, usual if rng.random() < USUAL else rng.randint(low, high)


def draw_object(rng: random.Random, foreign: float = 0.35) -> tuple[Schema, dict[str, Any]]:
    """A flat schema of one to six fields and an object for it."""
    size = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 6))
    value: dict[str, Any] = {}
    properties: Schema = {}
    while len(properties) < size:
        name, declared, content = draw_field(rng, foreign)
        if name not in properties:
            properties[name] = declared
            value[name] = content
    form = rng.random()
    if form < 0.2:  # as data class libraries write it
        titled = {key: {"title": key.replace("_", " ").title(), **entry} for key, entry in properties.items()}
        title = made_up.word(rng).capitalize()
        return {"properties": titled, "required": list(properties), "title": title, "type": "object"}, value
    schema: Schema = {"type": "object", "properties": properties}
    if form < 0.85:
        schema["required"] = list(properties)
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return schema, value


def draw_record(rng: random.Random) -> tuple[str, Schema, dict[str, Any]]:
    """A sentence, a schema, and the object that says the same."""
    kind = rng.randrange(4)
    name, friend = rng.sample(words.NAMES, 2)
    age, city = rng.randint(2, 99), rng.choice(words.CITIES)
    colour, day = rng.choice(words.COLOURS), rng.choice(words.DAYS)
    value: dict[str, Any]
    if kind == 0:
        text = f"{name} is {age} years old and lives in {city}."
        value = {"name": name, "age": age, "city": city}
    elif kind == 1:
        item = rng.choice(words.ITEMS)
        text = f"The {colour} {item} costs {age} dollars."
        value = {"item": item, "colour": colour, "price": age}
    elif kind == 2:
        hour = rng.randint(1, 12)
        text = f"{name} meets {friend} on {day} at {hour} o'clock."
        value = {"name": name, "friend": friend, "day": day, "hour": hour}
    else:
        animal, happy = rng.choice(words.ANIMALS), rng.random() < 0.5
        text = f"{name} has a {colour} {animal} and is {'happy' if happy else 'not happy'}."
        value = {"name": name, "animal": animal, "colour": colour, "happy": happy}
    keys = list(value)
    if rng.random() < 0.5:
        rng.shuffle(keys)
        keys = keys[: rng.randint(2, len(keys))]
    value = {key: value[key] for key in keys}
    types = {str: "string", int: "integer", bool: "boolean"}
    properties = {key: {"type": types[type(value[key])]} for key in keys}
    return text, {"type": "object", "properties": properties, "required": keys}, value


def chat(rng: random.Random, *, foreign: float = 0.35, made: bool = False) -> tuple[Chat, Schema]:
    """A conversation that asks for one object, with the schema it must satisfy; ``made``: nothing to read out."""
    out = Chat()
    kind = rng.uniform(0.28, 1.0) if made else rng.random()
    if kind < 0.28:
        text, schema, value = draw_record(rng)
        ask = rng.choice(("Extract", "Read out", "Turn this into JSON")) + f": {text}"
        body = json.dumps(schema, ensure_ascii=False)
        if rng.random() < 0.4:
            out.system = rng.choice(SYSTEMS).format(schema=body)
            ask = text if rng.random() < 0.5 else ask
        else:
            ask += f"\nSchema: {body}"
    else:
        schema, value = draw_object(rng, foreign)
        body = json.dumps(schema, ensure_ascii=False)
        subject = rng.choice(SUBJECTS)
        if kind < 0.55:
            out.system = rng.choice(SYSTEMS).format(schema=body)
            ask = rng.choice(SHORT_REQUESTS).format(subject=subject)
        elif kind < 0.65:
            keys = list(value)
            listed = ", ".join(keys[:-1]) + (" and " if keys[1:] else "") + keys[-1]
            ask = rng.choice(KEY_REQUESTS).format(keys=listed)
            schema = {"properties": {key: {} for key in keys}}  # nothing else was asked for
        else:
            ask = rng.choice(REQUESTS).format(schema=body, subject=subject)
    out.turns = [("user", ask, 0.0), ("assistant", json.dumps(value, ensure_ascii=False), 1.5)]
    return out, schema


def satisfies(value: Any, schema: Schema) -> bool:
    """True if a value is an object of a flat schema; makes only the checks that the evaluation needs."""
    if not isinstance(value, dict):
        return False
    properties = schema["properties"]
    if set(value) != set(properties):
        return False
    types = {"string": (str,), "integer": (int,), "boolean": (bool,), "number": (int, float)}
    return all(
        ("type" not in declared or type(value[key]) in types[declared["type"]])
        and ("enum" not in declared or value[key] in declared["enum"])
        and ("minimum" not in declared or declared["minimum"] <= value[key] <= declared["maximum"])
        for key, declared in properties.items()
    )
