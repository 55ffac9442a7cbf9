"""Messages to the metrics sink. Senders never wait: a full sink drops and counts."""

import msgspec

from troupellm.protocol.messages.worker import StepTimings


class DraftStats(msgspec.Struct, frozen=True, kw_only=True):
    """The draft tokens of a step, and the accepted ones, of rows with drafts."""

    rows: int
    drafted: int
    """Drafts that were verified, every node of a tree."""
    accepted: int
    accepted_at: tuple[int, ...]
    """How many rows had a draft accepted at the first position, at the second, and so on."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One per step, from the scheduler."""

    num_rows: int
    prefill_tokens: int
    decode_tokens: int
    seconds: float
    timings: StepTimings
    new_tokens: int
    preemptions: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache this step."""
    prefix_hits: int
    inter_token_seconds: tuple[tuple[float, int], ...] = ()
    """Of the rows that already had a token: an interval, and how many rows had it."""
    drafts: DraftStats | None = None
    """None: nothing was drafted."""


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """One per request, at its end, from the scheduler. Times are seconds."""

    reason: str
    """stop, length, abort, error."""
    n: int
    max_tokens: int
    prompt_tokens: int
    completion_tokens: int
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float
    session_cached_ratio: float | None = None
    """Share of the prompt that was found in the prefix cache; None: it names no session, or never began."""


class RequestRejected(msgspec.Struct, frozen=True):
    """Refused before the scheduler saw it: waiting queue full, invalid, draining."""

    reason: str


class RequestCancelled(msgspec.Struct, frozen=True):
    """Cancelled before its answer was complete."""

    by: str
    """client (left, or the caller cancelled), stall (the reader stayed away), shutdown, admin."""


MetricsMessage = StepStats | RequestStats | RequestRejected | RequestCancelled
