"""Messages between an API server process and the engine's process: one message is one frame.

An API process renders, tokenizes and validates; the engine's process decides who gets in, schedules and turns tokens
into text. `request` is the API process's own number of a request and means nothing to other API processes.
"""

from typing import Any

import msgspec

from troupellm.protocol import errors
from troupellm.protocol.api.caller import Caller
from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.config.kv_hints import NO_HINTS, KVHints, PrefixLease
from troupellm.protocol.errors import RequestFailed, TroupeError
from troupellm.protocol.messages.input import Demand, Generated
from troupellm.protocol.messages.snapshot import EngineSnapshot
from troupellm.protocol.messages.worker import LoadProgress, WorkerReady
from troupellm.protocol.params.outputs import FinishReason, Timing, TokenLogprob, Usage
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import Limits, SamplingParams
from troupellm.protocol.quota import Quota

# From an API process.


class Apply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for a place, before anything is rendered or tokenized. Answered by `Admitted` or `Ended`."""

    request: int
    arrival: float
    """Seconds on the machine's monotonic clock, which all its processes share."""
    demand: Demand
    wait: bool
    deadline: float | None
    moved: bool = False
    """Another engine had it: `queue_timeout`, which bounds the wait to begin, does not count for it."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request that was admitted and found valid."""

    request: int
    request_id: str
    prompt: bytes
    """int32 [prompt_tokens]."""
    params: SamplingParams
    streaming: bool
    cache_salt: bytes
    pooling: PoolingParams | None = None
    truncated: bool = False
    segment: int = 0
    leases: tuple[PrefixLease, ...] = ()
    """See `TokensPrompt`."""
    hints: KVHints = NO_HINTS
    adapter: str = ""
    """Name of a LoRA adapter."""
    generated: tuple[Generated, ...] = ()
    """See `Submission`."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Idempotent, at any time after `Apply`. Answered by `Ended` unless that is on its way already."""

    request: int
    invalid: bool = False
    """The API process has refused it."""


class PauseReader(msgspec.Struct, frozen=True, tag=True):
    """The request's reader is behind: send nothing more for it."""

    request: int


class ResumeReader(msgspec.Struct, frozen=True, tag=True):
    request: int


class AskMetrics(msgspec.Struct, frozen=True, tag=True):
    query: int
    compat: bool


class AskAdmin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An admin route was asked something; answered by `AdminAnswer`."""

    query: int
    action: str
    arguments: bytes
    """JSON."""


class AskCharge(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An API process counts tokens for a key; answered by `ChargeAnswer`."""

    query: int
    tenant: str
    tokens: int


class CorrectCharge(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An `AskCharge` was wrong by so many tokens and requests."""

    tenant: str
    tokens: int
    requests: int = 0


class CancelAdmin(msgspec.Struct, frozen=True, tag=True):
    """The client of the command has left."""

    query: int


class HttpCount(msgspec.Struct, frozen=True, array_like=True):
    """Answers of one kind."""

    method: str
    route: str
    status: int
    number: int


class ApiProcessReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Whenever one of these changes, and several times a second."""

    counts: tuple[HttpCount, ...]
    """The answers since the last report."""
    in_flight: int
    """Exchanges that use the engine."""
    draining: bool
    """The API process has heard of it: `in_flight` does not rise any more."""
    loop_lag: float
    """Seconds; worst lateness of the event loop lately."""
    log_lines_dropped: int
    """Since the API process began."""
    tasks: int = 0
    """Of the API process's event loop."""
    connections: int = 0
    """Open at the API process."""
    body_bytes: int = 0
    """Of request bodies that the API process works on."""
    bodies_waiting: int = 0
    template_processes: int = 0
    """That render chat templates for the API process."""
    connections_dropped: int = 0
    """By the API process, since it began."""


class ApiProcessReady(msgspec.Struct, frozen=True, tag=True):
    """The API process has read tokenizer and chat template, and answers requests."""


FromApiProcess = (
    Apply
    | Submit
    | Abort
    | PauseReader
    | ResumeReader
    | AskCharge
    | CorrectCharge
    | AskMetrics
    | AskAdmin
    | CancelAdmin
    | ApiProcessReport
    | ApiProcessReady
)

# From the engine's process.


class WireError(msgspec.Struct, frozen=True):
    """A `TroupeError` without its cause, which stays in the log of the process that knows it."""

    kind: str
    fields: dict[str, Any]
    """The error's own attributes, plain ones."""

    @classmethod
    def of(cls, error: TroupeError) -> "WireError":
        known = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
        return cls(known.__name__, plain)

    def error(self) -> TroupeError:
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, TroupeError)):
            return RequestFailed("the engine answered with an error that this front does not know")
        error = kind.__new__(kind)
        Exception.__init__(error, self.fields.get("message", ""))
        vars(error).update(self.fields)
        return error


class Configure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to an API process."""

    number: int
    """Which of the API processes it is, from 0."""
    server: ServerConfig
    """Without keys."""
    keys: dict[bytes, Caller]
    """SHA-256 of each API key to who has it, as they were read once for all API processes."""
    created: int
    """Epoch seconds, the same on every front."""
    admin_keys: dict[bytes, Caller] = {}
    """The same for the admin routes; without any they are not there."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    progress: LoadProgress


class Serving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded."""

    config: EngineConfig
    """Without secrets."""
    model_names: tuple[str, ...]
    tokenizer_folder: str
    defaults: dict[str, Any]
    limits: Limits
    ready: WorkerReady


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The published state, several times a second and whenever it changes."""

    snapshot: EngineSnapshot
    draining: bool
    in_flight_elsewhere: int
    """Exchanges of the other API processes."""


class Admitted(msgspec.Struct, frozen=True, tag=True):
    request: int
    quota: Quota | None = None
    """The rest of its tenant's limits."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A `Delta` of one of the API process's requests."""

    request: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    more: bool = False
    """The next chunk of the request is the rest of the same delta, whose text this one has."""


class PromptChunk(msgspec.Struct, frozen=True, array_like=True):
    """More log-probabilities of a prompt, in order."""

    request: int
    entries: tuple[TokenLogprob | None, ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing follows for this request. Without an error every sequence has finished."""

    request: int
    usage: Usage | None = None
    """With an error: what was used all the same, where it is known."""
    timing: Timing = Timing()
    pooled: bytes | None = None
    """float32, of a pooling request."""
    error: WireError | None = None


class Chunks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The new output of all requests of the process. Read in the order of the fields."""

    opened: tuple[int, ...] = ()
    """Requests that the engine has accepted for good."""
    prompts: tuple[PromptChunk, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    ended: tuple[Ended, ...] = ()


class MetricsText(msgspec.Struct, frozen=True, tag=True):
    query: int
    text: bytes
    """Empty where the engine is closing."""


class ChargeAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    query: int
    quota: Quota | None = None
    """The rest of the tenant's limits."""
    error: WireError | None = None


class AdminAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    query: int
    body: bytes = b""
    """JSON."""
    error: WireError | None = None


class SetLogLevel(msgspec.Struct, frozen=True, tag=True):
    level: str


class Cut(msgspec.Struct, frozen=True, tag=True):
    """The time to finish is over: end the exchanges that are left."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Close the connections and end."""

    seconds: float
    """The time that connections have to read their last bytes."""


ToApiProcess = (
    Configure
    | Loading
    | Serving
    | Status
    | Admitted
    | Ended
    | Chunks
    | MetricsText
    | AdminAnswer
    | ChargeAnswer
    | SetLogLevel
    | Cut
    | Leave
)
