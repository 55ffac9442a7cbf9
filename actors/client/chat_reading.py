"""A whole answer in a chat, told apart into content, reasoning and tool calls."""

from collections.abc import Sequence

import msgspec
from anyio.lowlevel import checkpoint

from troupellm.models.chat_parsers.parser import Parser
from troupellm.models.chat_parsers.served_parser import ChatParser
from troupellm.protocol.params.chat_events import ParsedPiece, Reasoning, assemble
from troupellm.protocol.params.outputs import Completion, CompletionChoice, FinishReason, Message

_SLICE = 8192
"""Characters that are parsed without a pause: a few milliseconds at worst."""


async def read_choice(
    choice: CompletionChoice, chat_parser: ChatParser | None, prompt_token_ids: Sequence[int] = ()
) -> tuple[Message, int]:
    """The message, and how many of its tokens were reasoning.

    Args:
        prompt_token_ids: of the rendered prompt.
        voice: how to read it; None where all of it is content.
    """
    if chat_parser is None:
        return Message(content=choice.text), 0
    parser, count = chat_parser.new_parser(prompt_token_ids), chat_parser.new_count(prompt_token_ids)
    pieces: list[ParsedPiece] = []
    for start in range(0, len(choice.text), _SLICE):
        pieces += parser.feed(choice.text[start : start + _SLICE])
        if start:
            await checkpoint()
    pieces += parser.finish(cut=was_cut(choice.finish_reason, choice.stop_reason))
    if count is not None:
        count.add(choice.token_ids, "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)]))
    message = _message(pieces, parser)
    if not chat_parser.show_reasoning:
        message = msgspec.structs.replace(message, reasoning=None)
    return message, 0 if count is None else count.tokens


def parse_message(
    text: str, chat_parser: ChatParser | None, *, cut: bool = False, prompt_token_ids: Sequence[int] = ()
) -> Message:
    """The same at once, for callers that block anyway.

    Args:
        cut: see `was_cut`.
    """
    if chat_parser is None:
        return Message(content=text)
    parser = chat_parser.new_parser(prompt_token_ids)
    return _message(parser.feed(text) + parser.finish(cut=cut), parser)


def was_cut(finish_reason: FinishReason | None, stop_reason: int | str | None) -> bool:
    """Whether a limit or a stop string ended an answer, and not the model."""
    return finish_reason != "stop" or isinstance(stop_reason, str)


def _message(pieces: list[ParsedPiece], parser: Parser) -> Message:
    message = assemble(pieces)
    if not message.tool_calls or parser.has_whole_calls:
        return message
    return msgspec.structs.replace(message, calls_whole=False)


async def read_completion(completion: Completion, chat_parser: ChatParser | None) -> Completion:
    """The same answer with each choice's message."""
    choices: list[CompletionChoice] = []
    reasoning_tokens = 0
    for choice in completion.choices:
        message, tokens = await read_choice(choice, chat_parser, completion.prompt_token_ids)
        choices.append(msgspec.structs.replace(choice, message=message))
        reasoning_tokens += tokens
    usage = msgspec.structs.replace(completion.usage, reasoning_tokens=reasoning_tokens)
    return msgspec.structs.replace(completion, choices=tuple(choices), usage=usage)
