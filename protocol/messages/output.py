"""Messages to the output actor (detokenizer and fan-out): one message per step for all requests."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.worker import RowLogprobs, RowPooled
from troupellm.protocol.params.outputs import Delta, FinishReason, TokenLogprob, Usage
from troupellm.protocol.params.sampling_checks import StopRegion


class Outbox(Protocol):
    """Where a request's answer goes: a local slot, or one frame per API process per step.

    All calls come from the output actor (or a supervisor) and never block. Pieces merge while they wait for the reader.
    """

    @property
    def streams(self) -> bool:
        """A wake is for every piece, not for the end alone."""

    def keep_apart(self) -> None:
        """Pieces of this request do not merge: the reader wants each token by itself."""

    def opened(self, prompt_token_ids: tuple[int, ...]) -> None:
        """The request passed validation and is queued."""

    def push(self, delta: Delta) -> None: ...

    def prompt_logprobs(self, entries: Sequence[TokenLogprob | None]) -> None: ...

    def pooled(self, vector: bytes) -> None:
        """The vector of a pooling request, float32; `close` follows."""

    def close(self, usage: Usage, scheduled: float | None, first_token: float | None) -> None:
        """Every sequence has finished."""

    def fail(self, error: TroupeError, spent: Usage | None = None) -> None:
        """The request ended with an error. After `close` or `fail` nothing follows.

        Args:
            spent: the tokens that it used all the same; None: not known.
        """

    def wake(self) -> None:
        """Let the reader see what was pushed."""


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sent before the scheduler hears of the request, so no step can name an unknown row."""

    request: int
    outbox: Outbox
    prompt_token_ids: bytes
    """int32 [prompt_tokens]."""
    rows: tuple[int, ...]
    """Row of each sequence, by index."""
    indices: tuple[int, ...] = ()
    """Index of each row's sequence, where another engine has ended others of the request; empty: 0, 1, 2, ..."""
    generated: tuple[bytes, ...] = ()
    """int32 [tokens] by row: those that the reader has from another engine, with their text; empty: none."""
    num_ended_tokens: int = 0
    """Tokens of the sequences that another engine has ended."""
    stop_strings: tuple[str, ...]
    include_stop_str_in_output: bool
    stop_regions: tuple[StopRegion, ...] = ()
    """Parts of the text in which stop strings do not count."""
    stop_inside: tuple[str, ...] | None = None
    """The marks that end the part in which the text begins; None: it begins outside."""
    skip_special_tokens: bool
    detokenize: bool
    logprobs: int | None
    prompt_logprobs: int | None
    min_tokens: int = 0
    """Stop strings do not count in the text of so many first tokens."""
    spaces_between_special_tokens: bool = True
    truncated: bool = False
    """The prompt was longer, and was cut because the request asked for it."""
    kept_token_ids: tuple[int, ...] = ()
    """Special tokens that are text although others are skipped."""
    stream_interval: int | None = None
    """Tokens between two wakes of the reader; None: as the flush interval has it."""


class RowFinished(msgspec.Struct, frozen=True, gc=False):
    row: int
    reason: FinishReason
    stop_token_id: int | None = None
    """Set when a stop token (not the model's own end token) ended the row."""
    hide_last: bool = False
    """The last token ended the row (end or stop token) and is not part of the text."""


class RowFailed(msgspec.Struct, frozen=True):
    row: int
    message: str
    code: str


class RequestClosed(msgspec.Struct, frozen=True, kw_only=True):
    """Terminal, exactly once per request that the scheduler accepted. Blocks are free."""

    request: int
    usage: Usage
    scheduled: float | None
    """Seconds on the engine's clock."""
    first_token: float | None
    error: TroupeError | None = None
    """Refused, failed or aborted by the engine; None is a normal end."""

    @property
    def spent(self) -> Usage:
        """The usage that its tenant pays: a prompt is free until a part of it is computed."""
        return self.usage if self.scheduled is not None else msgspec.structs.replace(self.usage, prompt_tokens=0)


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The new tokens of one step. `rows` and `token_counts` are parallel; `tokens` lists row after row."""

    step: int
    rows: tuple[int, ...] = ()
    token_counts: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    finished: tuple[RowFinished, ...] = ()
    pooled: tuple[RowPooled, ...] = ()
    failed: tuple[RowFailed, ...] = ()
    closed: tuple[RequestClosed, ...] = ()


OutputMessage = OpenRequest | StepOutput
