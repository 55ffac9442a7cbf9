"""The picture of a running engine that the page draws: numbers and states, and no text of a prompt or an answer.

Lists are bounded, so that a view stays below 16 KB however many requests there are.
"""

import msgspec

MOST_REQUESTS = 100
"""Rows of the table of requests; `LiveView.hidden` counts the others."""
MOST_CELLS = 512
"""Cells of the map of KV blocks."""
MOST_STEPS = 100
MOST_KEYS = 32

FREE, CACHED, IN_USE, SHARED, OWNERS = 0, 1, 2, 3, 4
"""Values of cells. Those from `OWNERS` on are blocks of one request: `OWNERS + its number % NUM_COLOURS`."""
NUM_COLOURS = 8


class RequestView(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One sequence of a request."""

    number: int
    state: str
    """waiting, held, loading, prefill, decode, paused or preempted."""
    why: int
    """Why it does not run: place in `reasons`, whose first one is empty: it runs."""
    key: int
    """Place of its API key in `keys`; -1: it is not among them."""
    prompt_tokens: int
    computed: int
    """Positions whose KV is computed, or will be by a plan in flight."""
    generated: int
    blocks: int
    age_ms: int
    first_token_ms: int | None


class StepView(msgspec.Struct, frozen=True, gc=False, array_like=True):
    prefill_tokens: int
    decode_tokens: int
    rows: int
    milliseconds: float


class KeyView(msgspec.Struct, frozen=True, gc=False, array_like=True):
    name: str
    running: int
    waiting: int
    served: float
    """Tokens by the counter of fair shares."""


class SchedulerView(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's part."""

    requests: tuple[RequestView, ...] = ()
    reasons: tuple[str, ...] = ("",)
    hidden: int = 0
    keys: tuple[KeyView, ...] = ()
    cells: tuple[int, ...] = ()
    """The map of KV blocks, run-length coded: a value and how often it comes, and so on."""
    blocks_per_cell: int = 1


class MailboxView(msgspec.Struct, frozen=True, gc=False, array_like=True):
    name: str
    restarts: int
    depth: int
    capacity: int
    messages: int
    dropped: int


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    state: str
    model: str
    notice: str
    """Why requests wait all together, such as a worker that restarts; empty: they do not."""
    uptime_ms: int
    open_requests: int
    running: int
    waiting: int
    paused: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    tokens_generated: int
    prompt_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: int
    recent: tuple[StepView, ...]
    """The last steps, the newest at the end."""
    actors: tuple[MailboxView, ...]
    scheduler: SchedulerView


def without_names(view: LiveView) -> LiveView:
    """The same view with numbers in place of the names of API keys."""
    keys = tuple(
        [
            msgspec.structs.replace(key, name=f"key {place}" if key.name else "")
            for place, key in enumerate(view.scheduler.keys, 1)
        ]
    )
    return msgspec.structs.replace(view, scheduler=msgspec.structs.replace(view.scheduler, keys=keys))
