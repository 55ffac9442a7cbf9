"""JSON objects for a simple schema: made up from the schema alone, or read out of a sentence."""

import json
import random
from typing import Any

from troupellm.models.builtin import words
from troupellm.models.builtin.documents import Chat

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


def draw_field(rng: random.Random) -> tuple[str, Schema, Any]:
    """A field: its name, its schema and a value that satisfies it."""
    kind = rng.random()
    if kind < 0.36:
        name = rng.choice(tuple(STRINGS))
        return name, {"type": "string"}, _usually(rng, STRINGS[name])
    if kind < 0.62:
        name = rng.choice(tuple(INTEGERS))
        usual, low, high = INTEGERS[name]
        number = usual if rng.random() < USUAL else rng.randint(low, high)
        return name, {"type": "integer"}, number
    if kind < 0.76:
        name = rng.choice(BOOLEANS)
        return name, {"type": "boolean"}, rng.random() < 0.8
    if kind < 0.9:
        name = rng.choice(tuple(ENUMS))
        options = list(ENUMS[name])
        if rng.random() < 0.4:
            options = rng.sample(words.WORDS, rng.randint(2, 4))
        rng.shuffle(options)
        return name, {"type": "string", "enum": options}, options[0]
    name = rng.choice(words.WORDS)
    declared, value = rng.choice((("string", name), ("integer", 1), ("boolean", True)))
    return name, {"type": declared}, value


def draw_object(rng: random.Random) -> tuple[Schema, dict[str, Any]]:
    """A flat schema and an object for it."""
    properties: Schema = {}
    value: dict[str, Any] = {}
    for _ in range(rng.choice((1, 2, 2, 3, 3, 3, 4, 5))):
        name, declared, content = draw_field(rng)
        if name not in properties:
            properties[name] = declared
            value[name] = content
    schema: Schema = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
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


def chat(rng: random.Random) -> tuple[Chat, Schema]:
    """A conversation that asks for one object, with the schema it must satisfy."""
    out = Chat()
    kind = rng.random()
    if kind < 0.35:
        text, schema, value = draw_record(rng)
        ask = rng.choice(("Extract", "Read out", "Turn this into JSON")) + f": {text}"
        body = json.dumps(schema, ensure_ascii=False)
        if rng.random() < 0.4:
            out.system = rng.choice(SYSTEMS).format(schema=body)
            ask = text if rng.random() < 0.5 else ask
        else:
            ask += f"\nSchema: {body}"
    else:
        schema, value = draw_object(rng)
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
    """Whether a value is an object of a flat schema: the checks the evaluation needs, no more."""
    if not isinstance(value, dict):
        return False
    properties = schema["properties"]
    if set(value) != set(properties):
        return False
    types = {"string": str, "integer": int, "boolean": bool}
    return all(
        ("type" not in declared or type(value[key]) is types[declared["type"]])
        and ("enum" not in declared or value[key] in declared["enum"])
        for key, declared in properties.items()
    )
