"""LiteLLM as its users call it. Arguments: URL of the API, model. Prints what it saw as JSON."""

import asyncio
import json
import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
            "required": ["first", "second"],
        },
    },
}


def main(url: str, model: str) -> None:
    messages = [{"role": "user", "content": "What is 23 + 45?"}]
    common = {"api_base": url, "api_key": "none", "temperature": 0, "num_retries": 0}
    chat = {"model": f"hosted_vllm/{model}", "messages": messages, "max_tokens": 24, **common}
    whole = litellm.completion(**chat)
    streamed = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    choice = {"type": "function", "function": {"name": "add"}}
    forced = litellm.completion(**chat | {"max_tokens": 96}, tools=[TOOL], tool_choice=choice)
    calls = forced.choices[0].message.tool_calls or []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(litellm.completion(**chat | {"max_tokens": 96}, tools=[TOOL], tool_choice=choice, **options))
    assembled = litellm.stream_chunk_builder(pieces, messages=messages)
    streamed_calls = assembled.choices[0].message.tool_calls or []

    async def at_once() -> list[str]:
        answers = await asyncio.gather(*(litellm.acompletion(**chat) for _ in range(3)))
        return [answer.choices[0].message.content for answer in answers]

    complete = {"model": f"text-completion-openai/{model}", "prompt": "Once upon", "max_tokens": 8, **common}
    text = litellm.text_completion(**complete)
    text_streamed = list(litellm.text_completion(**complete, stream=True))
    found = litellm.embedding(model=f"hosted_vllm/{model}", input=["a fox", "x"], api_base=url, api_key="none")
    try:
        litellm.completion(**chat | {"model": "hosted_vllm/nobody"})
        refused = ""
    except litellm.NotFoundError as error:
        refused = type(error).__name__
    seen = {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices),
        "usage": whole.usage.completion_tokens,
        "streamed_usage": [chunk.usage.completion_tokens for chunk in streamed if getattr(chunk, "usage", None)][-1:],
        "calls": [[call.function.name, sorted(json.loads(call.function.arguments))] for call in calls],
        "at_once": asyncio.run(at_once()),
        "said": [[call.function.name, call.function.arguments] for call in calls],
        "streamed_said": [[call.function.name, call.function.arguments] for call in streamed_calls],
        "text": text.choices[0].text,
        "text_streamed": "".join(chunk.choices[0].text or "" for chunk in text_streamed if chunk.choices),
        "vectors": [item["embedding"] for item in found.data],
        "refused": refused,
    }
    print(json.dumps(seen))


main(*sys.argv[1:3])
