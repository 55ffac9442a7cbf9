"""Whole answers: the choices of a request that has ended, a chat's told apart into content, reasoning, tool calls."""

from collections.abc import Mapping, Sequence

import msgspec
from anyio.lowlevel import checkpoint

from troupellm.models.chat_parsers.parser import Parser
from troupellm.models.chat_parsers.served_parser import ChatParser
from troupellm.protocol.params.chat_events import ParsedPiece, Reasoning, assemble
from troupellm.protocol.params.outputs import Completion, CompletionChoice, Delta, FinishReason, Message
from troupellm.protocol.params.sampling import SamplingParams


def gather_choices(
    pieces: Mapping[int, Sequence[Delta]], params: SamplingParams | None = None
) -> tuple[CompletionChoice, ...]:
    """The choices of a request that has ended.

    Args:
        pieces: deltas by sequence.
        params: of the request; None shows every sequence.
    """
    choices = [_choice(index, pieces[index]) for index in sorted(pieces)]
    if params is None or params.selects is None:
        return tuple(choices)
    if not params.use_beam_search:  # whose sequences come in order
        choices.sort(key=lambda choice: -(choice.cumulative_logprob or 0.0))
    shown = choices[: params.n]
    hidden = params.logprobs is None
    return tuple(
        msgspec.structs.replace(choice, index=index, logprobs=None if hidden else choice.logprobs)
        for index, choice in enumerate(shown)
    )


def _choice(index: int, deltas: Sequence[Delta]) -> CompletionChoice:
    described = any(delta.logprobs is not None for delta in deltas)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return CompletionChoice(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        logprobs=logprobs if described else None,
        cumulative_logprob=sum(entry.logprob for entry in logprobs) if described else None,
    )


_SLICE = 8192
"""Characters that are parsed without a pause: a few milliseconds at worst."""


async def read_choice(
    choice: CompletionChoice, chat_parser: ChatParser | None, prompt_token_ids: Sequence[int] = ()
) -> tuple[Message, int]:
    """The message, and how many of its tokens were reasoning.

    Args:
        prompt_token_ids: of the rendered prompt.
        chat_parser: how to read it; None where all of it is content.
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
    reasoning = 0
    for choice in completion.choices:
        message, tokens = await read_choice(choice, chat_parser, completion.prompt_token_ids)
        choices.append(msgspec.structs.replace(choice, message=message))
        reasoning += tokens
    usage = msgspec.structs.replace(completion.usage, reasoning_tokens=reasoning)
    return msgspec.structs.replace(completion, choices=tuple(choices), usage=usage)
