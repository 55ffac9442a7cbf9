"""The chat turn, which every chat API goes through: from a checked body to parsed pieces of the answer."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from troupellm.actors.client.chat_turn import ChatTurn, TurnAnswer
from troupellm.actors.client.stream import Stream
from troupellm.models.chat_parsers.served_parser import ChatParser
from troupellm.models.media.description import text_only
from troupellm.protocol.api.anthropic import InputMessage
from troupellm.protocol.api.chat import ChatMessage, ChatRequest, ToolFields
from troupellm.protocol.api.tools import ToolBody, ToolChoiceBody
from troupellm.protocol.config.kv_hints import CacheMark
from troupellm.protocol.messages.input import ChatPrompt
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.protocol.params.tools import NO_TOOLS, ToolUse, by_name, tool_use
from troupellm.server.base.body import is_large
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.threads import offload
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.cache_marks import marks_of_chat
from troupellm.server.openai.kv_sessions import keep_session
from troupellm.server.openai.parameters import chat_prompt, refuse_unsupported, renames, sampling_params
from troupellm.server.openai.past_messages import plain_messages
from troupellm.server.openai.streaming import Session, account, options, session_of

__all__ = ["ServedTurn", "TurnAnswer", "open_turn", "prepare", "read_parts", "tool_use_of"]

INLINE_TOOLS = 16
INLINE_LETTERS = 32_768
"""Of arguments in past calls, and of schemas."""
INLINE_PARTS = 1_024
"""Messages, or parts of their contents, that are read on the event loop."""
_PART_LETTERS = 8
"""Letters that a part of a schema counts for, beside its texts."""

T = TypeVar("T")
_Messages = Sequence[ChatMessage] | Sequence[InputMessage]


class ServedTurn(ChatTurn):
    """A turn that keeps the books of its exchange: tokens and times for the access line, what is left of a quota."""

    def __init__(
        self,
        exchange: Exchange,
        stream: Stream,
        params: SamplingParams,
        model: str,
        chat_parser: ChatParser | None = None,
    ) -> None:
        super().__init__(stream, params.n, chat_parser, exchange.delivered)
        self._exchange = exchange
        self.params = params
        self.model = model
        """The name to report, of those that the model is served under."""

    async def opened(self) -> None:
        await super().opened()
        self._exchange.prompt_made(len(self.prompt_token_ids))

    async def collect(self) -> TurnAnswer:
        if self._exchange.room is not None and is_large(self._exchange):
            await self.opened()
        answer = await super().collect()
        account(self._exchange, [answer.completion])
        return answer


@asynccontextmanager
async def open_turn(
    host: ServerState,
    exchange: Exchange,
    request: ChatRequest,
    *,
    streaming: bool,
    request_id: str | None = None,
    marks: tuple[CacheMark, ...] | None = None,
) -> AsyncIterator[ServedTurn]:
    """Check a chat request and open it in the engine; leaving the block ends it.

    Args:
        marks: up to where the prompt is to be kept in the KV cache; None: as the request's parts say.
        streaming: False when only `collect` is used: one wake at the end.
        request_id: the engine's name for it, which shows in logs; the engine makes one otherwise.

    Raises:
        TroupeError: it was refused, or (from the turn, once it is read) failed.
    """
    engine = host.require()
    model = await host.check_model(exchange, request.model)
    exchange.renames = renames(request)
    prepared = await prepare(host, exchange, request)
    if prepared.skipped:
        host.skipped.report(exchange, prepared.skipped)
    params = prepared.params
    if marks is None and any(isinstance(message.content, list) for message in request.messages):
        marks = await read_parts(exchange, request.messages, partial(marks_of_chat, request.messages))
    prompt = msgspec.structs.replace(prepared.prompt, cache_marks=marks or ())
    given = options(exchange, request)
    async with engine.stream(prompt, params, request_id=request_id, streaming=streaming, **given) as stream:
        exchange.quota = stream.quota
        turn = ServedTurn(exchange, stream, params, model, prepared.chat_parser)
        try:
            yield turn
        finally:
            if turn.called and given["hints"].session:
                await keep_session(host, exchange, given["hints"].session)


class Prepared(msgspec.Struct, frozen=True):
    """A chat request that is ready for the engine."""

    prompt: ChatPrompt
    params: SamplingParams
    chat_parser: ChatParser | None
    skipped: list[str]
    """Parts that the model does not get as they were sent; see `skipped_names`."""


async def prepare(host: ServerState, exchange: Exchange, request: ChatRequest) -> Prepared:
    """Everything that is checked and made before the engine hears of the request.

    Raises:
        InvalidRequest: names the field.
    """
    engine = host.require()
    refuse_unsupported(request, trust_chat_template=host.config.trust_request_chat_template)
    session = session_of(exchange, request)
    kwargs = engine.chat_format.with_effort(request.chat_template_kwargs, request.reasoning_effort)
    slow = not engine.chat_format.knows_opening(kwargs)
    if slow or has_slow_parts(exchange, request.messages) or has_long_tools(request, request.messages):
        return await offload(partial(_prepare, host, engine, session, request))
    return _prepare(host, engine, session, request)


def _prepare(host: ServerState, engine: ServedEngine, session: Session, request: ChatRequest) -> Prepared:
    use = tool_use_of(request, automatic=engine.config.model.enable_auto_tool_choice)
    chat = plain_messages(request.messages, no_images(engine))
    messages = chat.messages if host.volatile_lines is None else host.volatile_lines.moved(chat.messages)
    prompt = chat_prompt(request, messages, by_name(use.tools) if session.id and use.tools else use.tools)
    kwargs = engine.chat_format.with_effort(prompt.template_kwargs, request.reasoning_effort)
    prompt = msgspec.structs.replace(prompt, template_kwargs=kwargs, media=chat.media)
    chat_parser = engine.chat_parser(prompt, use, show_reasoning=request.include_reasoning is not False)
    params = sampling_params(request, engine)
    params = params if chat_parser is None else chat_parser.applied(params)
    return Prepared(prompt, params, chat_parser, [*session.skipped, *chat.skipped])


def no_images(engine: ServedEngine) -> str | None:
    """Why an engine takes no images, for clients; None where it takes them."""
    return None if engine.ready.media is not None else text_only(engine.model_names[0], engine.config.media)


def tool_use_of(request: ToolFields, *, automatic: bool = True) -> ToolUse:
    """The tools of a request, checked.

    Args:
        automatic: tools may be called where the request does not say so.

    Raises:
        InvalidRequest: names the field.
    """
    if not request.tools and request.tool_choice in (None, "none", "auto"):
        return NO_TOOLS
    choice = _plain_choice(request.tool_choice)
    if choice is None and not automatic:
        choice = "none"
    return tool_use(plain_tools(request.tools), choice, request.parallel_tool_calls)


def has_many_parts(messages: _Messages) -> bool:
    """Whether reading them takes more than a millisecond, however short they are."""
    if len(messages) > INLINE_PARTS:
        return True
    return sum(len(message.content) for message in messages if isinstance(message.content, list)) > INLINE_PARTS


def has_long_tools(request: ToolFields, messages: Sequence[ChatMessage]) -> bool:
    """Whether reading what it says about tools, and about the form of the answer, takes more than a millisecond."""
    functions = [tool.function for tool in request.tools or () if tool.function is not None]
    schemas = [text for function in functions for text in (function.description, function.parameters)]
    forms = [request.response_format, request.structured_outputs, request.guided_json, request.guided_choice]
    if _are_long([*schemas, *forms, request.guided_grammar, request.guided_regex]):
        return True
    calls = [given for message in messages for given in (message.tool_calls, message.function_call) if given]
    return len(request.tools or ()) > INLINE_TOOLS or _are_long(calls)


def _are_long(values: Sequence[Any]) -> bool:
    """Whether plain values have more than `INLINE_LETTERS` together; no more of them is looked at."""
    waiting, letters = list(values), 0
    while waiting and letters <= INLINE_LETTERS:
        value = waiting.pop()
        letters += _PART_LETTERS
        if isinstance(value, str):
            letters += len(value)
        elif isinstance(value, Mapping):
            letters += sum(map(len, value))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value[:INLINE_LETTERS]
        elif isinstance(value, StructuredOutputsParams):
            waiting += [value.json, value.regex, value.choice, value.grammar, value.structural_tag]
    return letters > INLINE_LETTERS


def plain_tools(tools: Sequence[ToolBody] | None) -> list[dict[str, Any]]:
    """Tools as plain data; what they hold is checked elsewhere."""
    return [_plain_tool(tool) for tool in tools or ()]


def _plain_tool(tool: ToolBody) -> dict[str, Any]:
    function = tool.function
    if function is None:
        return {"type": tool.type}
    plain = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": function.strict,
    }
    return {"type": tool.type, "function": plain}


def _plain_choice(choice: str | ToolChoiceBody | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    plain: dict[str, Any] = {"type": choice.type}
    if choice.function is not None:
        plain["function"] = {"name": choice.function.name}
    if choice.allowed_tools is not None:
        entries = [
            {"type": entry.type, "function": {"name": entry.function.name}} if entry.function else {"type": entry.type}
            for entry in choice.allowed_tools.tools
        ]
        plain["allowed_tools"] = {"mode": choice.allowed_tools.mode, "tools": entries}
    return plain


def has_slow_parts(exchange: Exchange, messages: _Messages) -> bool:
    nested = is_large(exchange) and any(isinstance(message.content, list | dict) for message in messages)
    return nested or has_many_parts(messages)


async def read_parts(exchange: Exchange, messages: _Messages, work: Callable[[], T]) -> T:
    """The result of work that reads every part of the messages: on a thread where that takes long.

    Raises:
        HttpError: 503, the machine gives no more threads.
    """
    return await offload(work) if has_slow_parts(exchange, messages) else work()
