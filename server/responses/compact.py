"""Compaction: a conversation becomes a summary, which clients carry along as one item that they do not read.

The model writes the summary behind the conversation itself, so that its prompt comes from the prefix cache. The next
prompt has the system messages and the summary, and nothing else of what came before.
"""

from collections.abc import Sequence

import msgspec

from troupellm.protocol.api.chat import ChatMessage, ChatRequest
from troupellm.protocol.api.responses import InputTokensRequest, ResponsesRequest
from troupellm.protocol.api.tools import AllowedTools, ChosenTool, ToolChoiceBody
from troupellm.protocol.errors import InvalidRequest, RequestFailed
from troupellm.protocol.params.outputs import Usage
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.chat_turn import open_turn, prepare
from troupellm.server.responses.sealed import MAX_SEALED_BYTES
from troupellm.server.responses.summaries import START, said, sealed_summary
from troupellm.server.storage.kept_items import COMPACTION

TRIGGER = "compaction_trigger"
MAX_SUMMARY_TOKENS = 4_096
MAX_NEWEST_BYTES = 65_536
"""Of the user's newest message, which the item keeps word for word; of a longer one it has the summary only."""
PROMPT = (
    "Summarize the conversation above for an assistant that continues it and sees nothing but your summary. Keep the "
    "user's goals and wishes, decisions, facts, names of files and functions, commands and their results, the state of "
    "the work, and the next steps. Write only the summary, and call no tool."
)


class Summary(msgspec.Struct, frozen=True):
    text: str
    newest: str | None
    """The user's newest message; None where there is none."""
    sealed: str
    """Both as `encrypted_content` of an item."""
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


async def is_longer(host: ServerState, exchange: Exchange, chat: ChatRequest, tokens: int) -> bool:
    """Whether the prompt of a chat has more tokens."""
    prepared = await prepare(host, exchange, chat)
    return await host.counting.number(host.require(), exchange.key, prepared.prompt) > tokens


async def summarize(host: ServerState, exchange: Exchange, chat: ChatRequest) -> Summary:
    """Have the model write a summary.

    Raises:
        TroupeError: the request was refused or failed, or the summary is empty: the conversation is not lost over it.
    """
    question = _question(host, chat)
    written, usage = await _written(host, exchange, question)
    if not written and chat.tools:  # the model has called a tool instead
        written, further = await _written(host, exchange, msgspec.structs.replace(question, tool_choice="none"))
        usage = together(usage, further)
    return summary_of(chat.messages, written, usage)


async def _written(host: ServerState, exchange: Exchange, question: ChatRequest) -> tuple[str, Usage]:
    async with open_turn(host, exchange, question, streaming=False) as turn:
        answer = await turn.collect()
    return (answer.choices[0].content or "").strip(), answer.usage


def summary_of(messages: Sequence[ChatMessage], written: str, usage: Usage) -> Summary:
    """
    Args:
        messages: the conversation.
        written: by the model, about it.

    Raises:
        RequestFailed: the text is empty, or too long.
    """
    if not written:
        raise RequestFailed("the model has written an empty summary; the conversation is unchanged", code="no_summary")
    newest = _newest(messages)
    kept = newest if newest is not None and len(newest.encode("utf-8", "replace")) <= MAX_NEWEST_BYTES else None
    packed = sealed_summary(written, kept) or sealed_summary(written, None)
    if packed is None:
        raise RequestFailed(f"the summary has more than {MAX_SEALED_BYTES} bytes")
    return Summary(written, newest, packed, usage)


def compacted(chat: ChatRequest, summary: Summary) -> ChatRequest:
    """The chat with its summary and the user's newest message in the place of the conversation."""
    first = _leading_system(chat.messages)
    shown = [ChatMessage(role="user", content=text) for text in said(summary.text, summary.newest)]
    return msgspec.structs.replace(chat, messages=[*chat.messages[:first], *shown])


def together(one: Usage, other: Usage) -> Usage:
    """The usage of a summary and of the answer that follows."""
    return msgspec.structs.replace(
        other,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        reasoning_tokens=one.reasoning_tokens + other.reasoning_tokens,
    )


def _question(host: ServerState, chat: ChatRequest) -> ChatRequest:
    """A chat that asks for the summary, in plain text and without thinking."""
    thinking = host.require().chat_format.chat_syntax.thinking
    switches = thinking.switches if thinking else ()
    most = min(MAX_SUMMARY_TOKENS, max(1, host.require().limits.max_model_len // 4))
    messages = list(chat.messages)
    if len(messages) > 1 and messages[-1].role == "user" and not messages[-1].content:
        del messages[-1]  # an input of nothing but the trigger
    return msgspec.structs.replace(
        chat,
        messages=[*messages, ChatMessage(role="user", content=PROMPT)],
        max_completion_tokens=most,
        tool_choice=optional_choice(chat.tool_choice),
        chat_template_kwargs={**(chat.chat_template_kwargs or {}), **dict.fromkeys(switches, False)} or None,
        thinking_token_budget=None,
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


def optional_choice(choice: str | ToolChoiceBody | None) -> str | ToolChoiceBody | None:
    """A choice that shows the same tools and requires no call, so that the prompt comes from the prefix cache."""
    if choice is None or isinstance(choice, str):
        return "auto" if choice == "required" else choice
    if choice.allowed_tools is not None:
        allowed = msgspec.structs.replace(choice.allowed_tools, mode="auto")
    else:
        allowed = AllowedTools(mode="auto", tools=[ChosenTool(type="function", function=choice.function)])
    return ToolChoiceBody(type="allowed_tools", allowed_tools=allowed)


def _leading_system(messages: Sequence[ChatMessage]) -> int:
    return next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))


def _newest(messages: Sequence[ChatMessage]) -> str | None:
    """The newest text of the user that is no summary."""
    texts = (message.content for message in reversed(messages) if message.role == "user" and message.content)
    found = next(texts, None)
    return found if isinstance(found, str) and not found.startswith(START) else None
