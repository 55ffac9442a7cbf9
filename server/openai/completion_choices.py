"""Choices of the completions API: whole or as chunks, with the echoed prompt and legacy log-probabilities."""

from collections.abc import Sequence

from msgspec import UNSET, Struct

from troupellm.actors.client.stream import Stream
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.api.chat import CompletionRequest, TextChoice, TextLogprobs, UsageBody
from troupellm.protocol.messages.input import Prompt, TextPrompt
from troupellm.protocol.params.outputs import Completion, CompletionChoice, Delta, TokenLogprob, Usage
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.server.base.sse import ChunkEncoder
from troupellm.server.base.threads import offload
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.openai.logprobs import echo_logprobs, prompt_logprobs, text_logprobs
from troupellm.server.openai.streaming import continuous_usage, finish_reason, include_usage, usage_body
from troupellm.server.openai.text_offsets import TextOffsets

LONG_PROMPT = 4_096
"""Tokens; longer prompts are turned back into text on a thread."""


class PromptEcho(Struct, frozen=True):
    """The text that echo puts in front of each choice."""

    text: str
    engine: ServedEngine
    as_ids: bool = False

    @classmethod
    async def of(
        cls, engine: ServedEngine, request: CompletionRequest, prompt: Prompt, token_ids: Sequence[int]
    ) -> "PromptEcho | None":
        """token_ids: of the prompt as the model got it."""
        if not request.echo:
            return None
        as_ids = bool(request.return_tokens_as_token_ids)
        if isinstance(prompt, TextPrompt) and prompt.truncation is None:
            return cls(prompt.text, engine, as_ids)
        if len(token_ids) > LONG_PROMPT:
            return cls(await offload(engine.tokenizer.decode, token_ids), engine, as_ids)
        return cls(engine.tokenizer.decode(token_ids), engine, as_ids)

    def logprobs(self, entries: Sequence[TokenLogprob | None] | None, ids: Sequence[int]) -> TextLogprobs | None:
        if entries is None:
            return None
        return echo_logprobs(entries, ids, self.text, self.engine.tokenizer, as_ids=self.as_ids)


class ChoiceWriter:
    """Turns completions and deltas into choices. Choice k of prompt p has the index p * n + k."""

    def __init__(
        self,
        request: CompletionRequest,
        response_id: str,
        created: int,
        model: str,
        fingerprint: str,
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self.request = request
        self.response_id = response_id
        self.scoring = bool(request.echo) and request.max_tokens == 0
        """Only the prompt's log-probabilities are wanted; the one generated token is not shown."""
        self.prompt_tokens = 0
        """Of all prompts of a stream, once they are let in: for the usage so far."""
        self._fingerprint = fingerprint
        self._n = params.n
        self._skip_special_tokens = params.skip_special_tokens
        self._tokenizer = tokenizer
        self._continuous = continuous_usage(request)
        self._show_ids = bool(request.return_token_ids)
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._text_only = not (self.scoring or self._continuous or self._show_ids)
        """Chunks between the first and the last one of a choice hold its text, unless there are log-probabilities."""
        self._offsets: dict[int, TextOffsets] = {}
        """Of the choices that have begun."""
        self._generated = 0
        self._encoder = ChunkEncoder(
            response_id=response_id,
            kind="text_completion",
            created=created,
            model=model,
            include_usage=include_usage(request),
            text_before=b'"text":',
            text_after=b',"logprobs":null,"finish_reason":null',
        )

    def whole(
        self, number: int, completion: Completion, choice: CompletionChoice, echo: PromptEcho | None
    ) -> TextChoice:
        text = "" if self.scoring else choice.text
        entries = () if self.scoring and choice.logprobs is not None else choice.logprobs
        logprobs = text_logprobs(entries, self._new_offsets(echo), as_ids=self._as_ids)
        if echo is not None:
            text = echo.text + text
            if logprobs is not None:
                logprobs = _joined(echo.logprobs(completion.prompt_logprobs, completion.prompt_token_ids), logprobs)
        shown = self.request.prompt_logprobs is not None and completion.prompt_logprobs is not None
        return TextChoice(
            index=number * self._n + choice.index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if self.scoring else choice.finish_reason,
            stop_reason=None if self.scoring else choice.stop_reason,
            token_ids=(() if self.scoring else choice.token_ids) if self._show_ids else UNSET,
            prompt_token_ids=completion.prompt_token_ids if self._show_ids else UNSET,
            prompt_logprobs=prompt_logprobs(completion.prompt_logprobs or ()) if shown else UNSET,
        )

    def chunk(self, number: int, stream: Stream, delta: Delta, echo: PromptEcho | None) -> bytes:
        """The chunks for one delta, with the echoed prompt in front of a choice's first."""
        index = number * self._n + delta.index
        if self._text_only and index in self._offsets and delta.finish_reason is None and not delta.logprobs:
            return self._encoder.text(index, delta.text) if delta.text else b""
        reason = finish_reason(delta)
        self._generated += len(delta.token_ids)
        data, prompt = b"", None
        if index not in self._offsets:
            self._offsets[index] = self._new_offsets(echo)
            prompt = stream.prompt_token_ids if self._show_ids else None
            if echo is not None:
                data, prompt = self._echo_chunk(index, stream, echo, prompt), None
        if self.scoring:
            delta = Delta(index=delta.index, finish_reason=delta.finish_reason)
            reason = "length" if reason else None
        usage = self._running_usage()
        show_ids = (self._show_ids and bool(delta.token_ids)) or prompt is not None
        if reason is None and not delta.logprobs and not show_ids and usage is None:
            return data + self._encoder.text(index, delta.text) if delta.text else data
        logprobs = text_logprobs(delta.logprobs, self._offsets[index], as_ids=self._as_ids)
        choice = TextChoice(
            index=index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._show_ids else UNSET,
            prompt_token_ids=UNSET if prompt is None else prompt,
        )
        return data + self._encoder.choice(choice, usage=usage, fingerprint=self._fingerprint if reason else None)

    def usage_chunk(self, usage: UsageBody) -> bytes:
        return self._encoder.usage(usage, fingerprint=self._fingerprint)

    def _echo_chunk(self, index: int, stream: Stream, echo: PromptEcho, prompt: Sequence[int] | None) -> bytes:
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = echo.logprobs(stream.prompt_logprobs, stream.prompt_token_ids)
        elif prompt is None and not self._continuous:
            return self._encoder.text(index, echo.text)
        choice = TextChoice(
            index=index,
            text=echo.text,
            logprobs=logprobs,
            finish_reason=None,
            prompt_token_ids=UNSET if prompt is None else prompt,
        )
        return self._encoder.choice(choice, usage=self._running_usage())

    def _new_offsets(self, echo: PromptEcho | None) -> TextOffsets:
        start = 0 if echo is None else len(echo.text)
        return TextOffsets(self._tokenizer, start, skip_special_tokens=self._skip_special_tokens)

    def _running_usage(self) -> UsageBody | None:
        """Of all choices of all prompts so far, as the last one is of all of them."""
        if not self._continuous:
            return None
        so_far = Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self._generated)
        return usage_body([so_far], hide_completion=self.scoring)


def _joined(first: TextLogprobs | None, second: TextLogprobs | None) -> TextLogprobs | None:
    if first is None or second is None:
        return first or second
    return TextLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=(first.top_logprobs or []) + (second.top_logprobs or []),
        text_offset=first.text_offset + second.text_offset,
    )
