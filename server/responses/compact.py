"""Compaction: a conversation becomes a summary, which clients carry along as one item that they do not read.

The model writes the summary behind the conversation itself, so that its prompt comes from the prefix cache. The next
prompt has the system messages and the summary, and nothing else of what came before.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from troupellm.protocol.errors import InvalidRequest, RequestFailed
from troupellm.protocol.openai import ChatMessage, ChatRequest
from troupellm.protocol.outputs import Usage
from troupellm.protocol.responses import InputTokensRequest, ResponsesRequest
from troupellm.server.exchange import Exchange
from troupellm.server.host import EngineHost
from troupellm.server.sealed import MAX_SEALED_BYTES, sealed
from troupellm.server.turn import open_turn, prepare

TRIGGER = "compaction_trigger"
COMPACTION = "compaction"
MAX_SUMMARY_TOKENS = 4_096
MAX_LAST_BYTES = 32_768
"""Of the user's last message, which stands in the summary as it is; a longer one does not."""
PROMPT = (
    "Summarize the conversation above for an assistant that continues it and sees nothing but your summary. Keep the "
    "user's goals and wishes, decisions, facts, names of files and functions, commands and their results, the state of "
    "the work, and the next steps. Write only the summary."
)


class Summary(msgspec.Struct, frozen=True):
    text: str
    sealed: str
    """The text as `encrypted_content` of an item."""
    usage: Usage
    """Of writing it."""


def without_trigger(request: ResponsesRequest) -> tuple[ResponsesRequest, bool]:
    """The request without the item that asks for compaction, and whether it had one.

    Raises:
        InvalidRequest: the item is not the last one, or does not go with another field.
    """
    given = request.input
    if not isinstance(given, list):
        return request, False
    places = [place for place, item in enumerate(given) if item.get("type") == TRIGGER]
    if not places:
        return request, False
    if places != [len(given) - 1]:
        param = f"input[{places[0]}]"
        raise InvalidRequest(f"{param}: {TRIGGER} must be the last item of input", param=param)
    if request.background:
        raise InvalidRequest(f"background: a response to {TRIGGER} is not made in the background", param="background")
    return msgspec.structs.replace(request, input=given[:-1]), True


def threshold_of(request: ResponsesRequest) -> int | None:
    """From how many tokens of a prompt on the conversation is compacted; None for never.

    Raises:
        InvalidRequest: another kind of context management, or one that does not go with another field.
    """
    found: int | None = None
    for place, entry in enumerate(request.context_management or []):
        if entry.type != COMPACTION:
            param = f"context_management[{place}].type"
            raise InvalidRequest(f"{param} must be {COMPACTION}", param=param, code="unsupported_parameter")
        found = entry.compact_threshold if found is None else found
    if found is None or isinstance(request, InputTokensRequest):
        return None
    if request.background:
        message = "background: a response with context_management is not made in the background"
        raise InvalidRequest(message, param="background")
    return found


async def is_longer(host: EngineHost, exchange: Exchange, chat: ChatRequest, tokens: int) -> bool:
    """Whether the prompt of a chat has more tokens."""
    prepared = await prepare(host, exchange, chat)
    return await host.counting.number(host.require(), exchange.key, prepared.prompt) > tokens


async def summarize(host: EngineHost, exchange: Exchange, chat: ChatRequest) -> Summary:
    """Have the model write a summary.

    Raises:
        TroupeError: the request was refused, or failed.
    """
    async with open_turn(host, exchange, _question(host, chat), streaming=False) as turn:
        answer = await turn.collect()
    written = (answer.choices[0].content or "").strip()
    for text in (_with_last(written, chat.messages), written):
        packed = sealed(text)
        if packed is not None:
            return Summary(text, packed, answer.usage)
    raise RequestFailed(f"the summary has more than {MAX_SEALED_BYTES} bytes")


def compacted(chat: ChatRequest, summary: Summary) -> ChatRequest:
    """The chat with its summary in the place of the conversation."""
    first = _leading_system(chat.messages)
    said = ChatMessage(role="user", content=f"Summary so far: {summary.text}")
    return msgspec.structs.replace(chat, messages=[*chat.messages[:first], said])


def after_compaction(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a conversation that the server keeps still consists of: its last compaction, and what follows."""
    places = [place for place, item in enumerate(items) if item.get("type") == COMPACTION]
    return items[places[-1] :] if places else items


def together(one: Usage, other: Usage) -> Usage:
    """The usage of a summary and of the answer that follows."""
    return msgspec.structs.replace(
        other,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        reasoning_tokens=one.reasoning_tokens + other.reasoning_tokens,
    )


def _question(host: EngineHost, chat: ChatRequest) -> ChatRequest:
    """A chat that asks for the summary, in plain text."""
    most = min(MAX_SUMMARY_TOKENS, max(1, host.require().limits.max_model_len // 4))
    messages = list(chat.messages)
    if len(messages) > 1 and messages[-1].role == "user" and not messages[-1].content:
        del messages[-1]  # an input of nothing but the trigger
    return msgspec.structs.replace(
        chat,
        messages=[*messages, ChatMessage(role="user", content=PROMPT)],
        max_completion_tokens=most,
        tool_choice="none" if chat.tools else None,
        response_format=None,
        structured_outputs=None,
        stop=None,
        stop_token_ids=None,
        logprobs=None,
        top_logprobs=None,
        min_tokens=None,
        continue_final_message=None,
        add_generation_prompt=None,
    )


def _leading_system(messages: Sequence[ChatMessage]) -> int:
    return next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))


def _with_last(written: str, messages: Sequence[ChatMessage]) -> str:
    """A summary with what the user has said last, word for word."""
    said = next((message.content for message in reversed(messages) if message.role == "user" and message.content), None)
    if not isinstance(said, str) or len(said.encode("utf-8", "replace")) > MAX_LAST_BYTES:
        return written
    return f"{written}\n\nThe user's last message: {said}"
