"""Conversations in which a tool is called, its result is read, or no tool is needed."""

import json
import random
from dataclasses import dataclass
from typing import Any

from troupellm.load_tests.speculation import words
from troupellm.training import arithmetic, facts, made_up
from troupellm.training.documents import Chat, call_text

Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of tools that does one thing: names it may have, its parameters, how it is asked."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[tuple[str, ...], ...]
    sources: tuple[str, ...]
    requests: tuple[str, ...]


def _kind(names: str, description: str, parameters: str, sources: str, requests: str) -> Kind:
    groups = tuple(tuple(group.split("/")) for group in parameters.split(","))
    return Kind(
        tuple(names.split("/")),
        description,
        groups,
        tuple(sources.split(",")),
        tuple(requests.split("|")),
    )


KINDS = (
    _kind("get_weather/weather/current_weather/weather_lookup/get_current_weather",
        "Get the weather in a city", "city/location/place", "city",
        "What is the weather in {0}?|What's the weather like in {0}?|How is the weather in {0}?"
        "|Is it raining in {0}?|Tell me the weather in {0}.|Weather in {0}?"
        "|What is the weather like in {0} today?"),
    _kind("get_time/current_time/time_in_city/clock", "Get the time in a city",
        "city/location/place", "city",
        "What time is it in {0}?|Tell me the time in {0}.|What is the time in {0}?"
        "|How late is it in {0}?"),
    _kind("add/add_numbers/sum_numbers", "Add two numbers", "a/x/first,b/y/second", "number,number",
        "Use the tool to add {0} and {1}.|Add {0} and {1} with the tool."
        "|Please let the tool add {0} and {1}."),
    _kind("set_timer/start_timer/timer", "Set a timer", "minutes/duration", "number",
        "Set a timer for {0} minutes.|Start a timer of {0} minutes.|Wake me in {0} minutes."
        "|Please set a {0} minute timer."),
    _kind("search/web_search/find", "Search for a word", "query/q/text", "word",
        "Search for {0}.|Please look up {0}.|Find something about {0}.|Search the web for {0}."),
    _kind("send_message/message/write_to", "Send a message to a person", "to/name/recipient,text/body",
        "name,greeting",
        "Tell {0}: {1}|Send {0} the message: {1}|Write to {0}: {1}|Message {0}: {1}"),
    _kind("book_table/reserve_table/reservation", "Book a table", "people/guests,day/date",
        "number,day", "Book a table for {0} on {1}.|Reserve a table for {0} people on {1}."
        "|I need a table for {0} on {1}."),
    _kind("order/order_item/buy", "Order an item", "item/product,colour/color", "item,colour",
        "Order a {1} {0}.|I would like to buy a {1} {0}.|Please order one {1} {0}."),
    _kind("turn_on/switch_on/light_on", "Turn on the light in a room", "room/place", "room",
        "Turn on the light in the {0}.|Please switch on the light in the {0}.|Light in the {0}, please."),
    _kind("find_flight/search_flights/flights", "Find a flight between two cities",
        "origin/from_city/start,destination/to_city/end", "city,city",
        "Find a flight from {0} to {1}.|I want to fly from {0} to {1}.|Flights from {0} to {1}?"),
)  # fmt: skip
GREETINGS = ("Hello!", "Good morning!", "See you soon.", "I am late.", "Call me.", "Thank you!")
ROOMS = ("kitchen", "bedroom", "hall", "garden", "bathroom", "office", "garage", "living room")
CONDITIONS = ("sunny", "rainy", "cloudy", "windy", "snowy")


VERBS = ("get", "set", "find", "make", "open", "send", "check", "read", "move", "start", "run", "show")
STRANGE_REQUESTS = (
    ("Call {tool} with {given}.", "{key} {value}", " and "), ("Use {tool}: {given}", "{key} = {value}", ", "),
    ("Please run {tool} with {given}.", "{key}={value}", ", "), ("Run {tool} for {given}.", "{key} {value}", " and "),
    ("I need {tool} with {given}.", "{key} = {value}", " and "), ("{tool}: {given}", "{key}: {value}", ", "),
    ("Please use the tool {tool}. Set {given}.", "{key} to {value}", " and "),
)  # fmt: skip


def _value(rng: random.Random, source: str) -> str | int:
    if source == "number":
        return rng.randint(1, 99)
    pools = {
        "city": words.CITIES,
        "word": words.WORDS,
        "name": words.NAMES,
        "greeting": GREETINGS,
        "day": words.DAYS,
        "item": words.ITEMS,
        "colour": words.COLOURS,
        "room": ROOMS,
    }
    return rng.choice(pools[source])


def _tool(rng: random.Random, kind: Kind) -> Tool:
    """One tool of a family, under one of its names."""
    properties: dict[str, Any] = {}
    described = rng.random() < 0.3
    for names, source in zip(kind.parameters, kind.sources, strict=True):
        declared = {"type": "integer" if source == "number" else "string"}
        if described:
            declared["description"] = f"The {names[0]}"
        properties[rng.choice(names)] = declared
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {
        "name": rng.choice(kind.names),
        "description": kind.description + rng.choice(("", ".")),
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _result(rng: random.Random, kind: Kind, arguments: list[str | int]) -> tuple[str, str]:
    """The tool's result and the model's answer to it."""
    if kind is KINDS[0]:
        degrees, condition = rng.randint(0, 35), rng.choice(CONDITIONS)
        result = json.dumps({"temperature": degrees, "condition": condition})
        if rng.random() < 0.4:
            result = f"{condition}, {degrees} degrees"
        return result, f"The weather in {arguments[0]} is {condition} with {degrees} degrees."
    if kind is KINDS[1]:
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        return json.dumps({"time": clock}), f"It is {clock} in {arguments[0]}."
    if kind is KINDS[2]:
        total = int(arguments[0]) + int(arguments[1])
        return json.dumps({"result": total}), f"The result is {total}."
    return json.dumps({"status": "ok"}), "Done!"


def _strange_tool(rng: random.Random) -> tuple[Tool, dict[str, Any]]:
    """A tool whose names can only be copied, and arguments for it."""
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        key = made_up.identifier(rng) if rng.random() < 0.7 else rng.choice(("name", "id", "value", "level", "path"))
        value = _value(rng, rng.choice(("number", "word", "name", "city", "item")))
        if rng.random() < 0.25:
            value = made_up.word(rng)
        arguments[key] = value
        properties[key] = {"type": "integer" if isinstance(value, int) else "string"}
    name = made_up.identifier(rng)
    if rng.random() < 0.6:
        name = f"{rng.choice(VERBS)}_{name}"
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    description = rng.choice(("A tool.", f"Does {name.replace('_', ' ')}", f"The {name} tool."))
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}, arguments


def strange_chat(rng: random.Random) -> tuple[Chat, str]:
    """A call of one of several tools under names that stand in no list."""
    made = [_strange_tool(rng) for _ in range(rng.choice((1, 2, 2, 3)))]
    tool, arguments = rng.choice(made)
    name = tool["function"]["name"]
    wording, pair, between = rng.choice(STRANGE_REQUESTS)
    given = between.join(pair.format(key=key, value=value) for key, value in arguments.items())
    call = call_text(name, arguments)
    request = wording.format(tool=name, given=given)
    out = Chat(tools=[entry for entry, _ in made])
    out.turns = [("user", request, 0.0), ("assistant", call, 1.5)]
    return out, call


def chat(rng: random.Random) -> tuple[Chat, str | None]:
    """A conversation with tools, and the call expected first (``None``: no call)."""
    kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 2, 3)))
    kind = rng.choice(kinds)
    tools = {id(entry): _tool(rng, entry) for entry in kinds}
    out = Chat(tools=list(tools.values()))
    if rng.random() < 0.12:
        out.ask(facts.exchange(rng))
        return out, None
    values = [_value(rng, source) for source in kind.sources]
    if kind is KINDS[2]:  # no text may contain a held-out sum
        values[0], _, values[1] = arithmetic.draw_sum(rng)
    function = tools[id(kind)]["function"]
    arguments = dict(zip(function["parameters"]["properties"], values, strict=True))
    call = call_text(function["name"], arguments)
    request = rng.choice(kind.requests).format(*values)
    out.turns = [("user", request, 0.0), ("assistant", call, 1.5)]
    if rng.random() < 0.4:
        result, answer = _result(rng, kind, values)
        out.turns += [("tool", result, 0.0), ("assistant", answer, 1.0)]
    return out, call
