"""ollama of PyPI as its users call it. Arguments: URL of the server, model. Prints what it saw as JSON."""

import asyncio
import json
import sys
from typing import Any

import ollama

URL, MODEL = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is 23 + 45?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"temperature": 0, "num_predict": 96}
SCHEMA = {
    "type": "object",
    "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    return f"It is sunny in {city}."


def main() -> dict[str, Any]:
    client = ollama.Client(host=URL)
    whole = client.chat(MODEL, QUESTION, options=GREEDY, keep_alive="5m")
    parts = list(client.chat(MODEL, QUESTION, options=GREEDY, stream=True))
    told = client.generate(MODEL, "What is 23 + 45?", options=GREEDY)
    told_parts = list(client.generate(f"{MODEL}:latest", "What is 23 + 45?", options=GREEDY, stream=True))
    formed = client.chat(MODEL, QUESTION, options=GREEDY, format=SCHEMA)
    called = client.chat(MODEL, WEATHER, options=GREEDY, tools=[get_weather])
    call = called.message.tool_calls[0].function
    result = {"role": "tool", "tool_name": call.name, "content": get_weather(**call.arguments)}
    answered = client.chat(MODEL, [*WEATHER, called.message, result], options=GREEDY, tools=[get_weather])
    refused = []
    for options, name in ((GREEDY, "nobody"), ({"temperature": 9}, MODEL)):
        try:
            client.chat(name, QUESTION, options=options)
        except ollama.ResponseError as error:
            refused.append([error.status_code, error.error])
    show = client.show(MODEL)
    return {
        "whole": whole.message.content,
        "streamed": "".join(part.message.content for part in parts),
        "done": [part.done for part in parts][-1],
        "counts": [whole.prompt_eval_count, whole.eval_count, parts[-1].prompt_eval_count, parts[-1].eval_count],
        "told": told.response,
        "told_streamed": "".join(part.response for part in told_parts),
        "formed": sorted(json.loads(formed.message.content)),
        "call": [call.name, dict(call.arguments)],
        "answered": answered.message.content,
        "refused": refused,
        "models": [model.model for model in client.list().models],
        "running": [model.model for model in client.ps().models],
        "capabilities": show.capabilities,
        "context": show.modelinfo[f"{show.modelinfo['general.architecture']}.context_length"],
        "vectors": [list(vector) for vector in client.embed(MODEL, ["a fox", "x"]).embeddings],
        "older": list(client.embeddings(MODEL, "a fox").embedding),
        "pulled": client.pull(MODEL).status,
        "loaded": client.generate(MODEL, "").done_reason,
    }


async def alongside() -> list[str]:
    """Three streams at once of the asynchronous client."""
    client = ollama.AsyncClient(host=URL)

    async def say() -> str:
        stream = await client.chat(MODEL, QUESTION, options=GREEDY, stream=True)
        return "".join([part.message.content async for part in stream])

    return list(await asyncio.gather(say(), say(), say()))


print(json.dumps(main() | {"alongside": asyncio.run(alongside())}))
