"""The results of `LLM`, with vLLM's names."""

from collections.abc import Sequence

import msgspec

from troupellm.actors.client.chat_reading import parse_message, was_cut
from troupellm.models.chat_parsers.served_parser import ChatParser
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.beam_search import BeamSearchOutput, BeamSearchSequence
from troupellm.protocol.params.outputs import (
    Completion,
    CompletionChoice,
    FinishReason,
    Message,
    Timing,
    TokenLogprob,
    Usage,
)


class Logprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    message: Message | None = None
    """In a chat: the text with reasoning and tool calls told apart."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: Timing
    usage: Usage
    """Of all answers together; what came of drafts, too."""


def with_messages(output: RequestOutput, chat_parser: ChatParser | None) -> RequestOutput:
    answers = [
        msgspec.structs.replace(answer, message=_message(answer, chat_parser, output.prompt_token_ids))
        for answer in output.outputs
    ]
    return msgspec.structs.replace(output, outputs=answers)


def _message(answer: CompletionOutput, chat_parser: ChatParser | None, prompt_token_ids: Sequence[int]) -> Message:
    cut = was_cut(answer.finish_reason, answer.stop_reason)
    return parse_message(answer.text, chat_parser, cut=cut, prompt_token_ids=prompt_token_ids)


def request_output(completion: Completion) -> RequestOutput:
    entries = completion.prompt_logprobs
    return RequestOutput(
        request_id=completion.request_id,
        prompt=completion.prompt,
        prompt_token_ids=list(completion.prompt_token_ids),
        prompt_logprobs=None
        if entries is None
        else [None if entry is None else token_logprobs(entry) for entry in entries],
        outputs=[_completion_output(choice) for choice in completion.choices],
        finished=True,
        num_cached_tokens=completion.usage.cached_tokens,
        metrics=completion.timing,
        usage=completion.usage,
    )


def _completion_output(choice: CompletionChoice) -> CompletionOutput:
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        cumulative_logprob=choice.cumulative_logprob,
        logprobs=None if choice.logprobs is None else [token_logprobs(entry) for entry in choice.logprobs],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def beam_output(output: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
    sequences = []
    for answer in output.outputs:
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=answer.logprobs or [],
                cum_logprob=answer.cumulative_logprob or 0.0,
                text=tokenizer.decode(output.prompt_token_ids) + answer.text,
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
            )
        )
    return BeamSearchOutput(sequences)


def token_logprobs(entry: TokenLogprob) -> dict[int, Logprob]:
    """The chosen token first, then the alternatives, as vLLM has them."""
    position = {entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)}
    for top in entry.top:
        position.setdefault(top.token_id, Logprob(top.logprob, top.rank, top.token))
    return position
