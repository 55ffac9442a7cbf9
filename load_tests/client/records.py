"""The record of one request of a load test, and the rules by which its stream is read and judged."""

from itertools import pairwise
from typing import Any

import msgspec

DONE = b"[DONE]"


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt: token ids or text for completions, text for chat."""

    prompt: str | list[int]
    output_len: int
    """Value of max_tokens."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def visible(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""

    @property
    def has_content(self) -> bool:
        return bool(self.visible or self.token_ids or (self.delta is not None and self.delta.tool_calls))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request. Times are seconds on `time.perf_counter`; a record without `error` succeeded."""

    index: int
    wanted_tokens: int
    ignore_eos: bool = False
    scheduled: float = 0.0
    """When the arrival process wanted it sent."""
    released: float = 0.0
    """When the client got round to it; later than `scheduled` means that the client is saturated."""
    sent: float = 0.0
    """Later than `released` by the wait for --max-concurrency."""
    ended: float = 0.0
    chunk_times: list[float] = []
    """Arrival of every chunk that carried content."""
    chunk_tokens: list[int] = []
    """Tokens in each such chunk, where the server tells (continuous usage or token ids); else empty."""
    answered: float = 0.0
    """Arrival of the last chunk of the answer: the one with the finish reason."""
    pieces: list[str] = []
    token_ids: list[int] = []
    """Where the server tells them (`return_token_ids`)."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    finish_reason: str | None = None
    done: bool = False
    stream_error: str = ""
    status: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first chunk with content."""
        return self.chunk_times[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending to the last chunk of the answer (end to end)."""
        return self.answered - self.sent

    @property
    def itls(self) -> list[float]:
        """Seconds between successive chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def queue_time(self) -> float:
        return self.sent - self.scheduled

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def on_event(self, payload: bytes, now: float) -> None:
        """Read one event of the stream, `now` being when its bytes came."""
        if payload == DONE:
            self.done = True
            return
        try:
            chunk = _decode_chunk(payload)
        except msgspec.DecodeError as error:
            self.stream_error = self.stream_error or f"event is not a chunk: {error}"
            return
        if chunk.error is not None:
            self.stream_error = self.stream_error or f"error event: {describe_error(chunk.error)}"
            return
        new_tokens = self._read_usage(chunk.usage)
        for choice in chunk.choices[:1]:
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
            if not choice.has_content and choice.finish_reason is None:
                continue
            if choice.token_ids is not None:
                new_tokens = len(choice.token_ids)
                self.token_ids += choice.token_ids
            self._add_chunk(choice, new_tokens, now)

    def _read_usage(self, usage: _Usage | None) -> int | None:
        if usage is None:
            return None
        new_tokens = usage.completion_tokens - self.output_tokens
        self.prompt_tokens, self.output_tokens, self.has_usage = usage.prompt_tokens, usage.completion_tokens, True
        return new_tokens

    def _add_chunk(self, choice: _Choice, new_tokens: int | None, now: float) -> None:
        """A finish chunk without content ends the answer; it is the first chunk only of an answer without text."""
        self.answered = now
        if choice.has_content or not self.chunk_times:
            self.chunk_times.append(now)
            if new_tokens is not None:
                self.chunk_tokens.append(new_tokens)
            if choice.visible:
                self.pieces.append(choice.visible)

    def judge(self, transport_error: str = "") -> None:
        """Decide success once the exchange is over; a stream that ended early without saying so is a failure."""
        if transport_error:
            self.error = transport_error
        elif self.status != 200:
            self.error = self.stream_error or f"HTTP {self.status}"
        elif self.stream_error:
            self.error = self.stream_error
        elif not self.done:
            self.error = "short stream: ended without [DONE]"
        elif self.finish_reason is None or not self.chunk_times:
            self.error = "short stream: no finish reason"
        elif not self.has_usage:
            self.error = "the stream carried no usage, so tokens cannot be counted"
        elif self.ignore_eos and self.output_tokens != self.wanted_tokens:
            self.error = f"short stream: {self.output_tokens} of {self.wanted_tokens} tokens"


def describe_error(error: Any) -> str:
    """The message of an error object of OpenAI's shape, on one line."""
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]
