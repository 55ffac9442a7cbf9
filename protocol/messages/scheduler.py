"""Messages to the scheduler. Data lane: new requests and step results; control lane: messages that overtake them."""

from collections.abc import Callable

import msgspec

from troupellm.protocol.config.kv_hints import DropSession, KeepTurn, PrefetchSession, PrefixLease
from troupellm.protocol.messages.adapters import AdapterPreparation, AdapterRef
from troupellm.protocol.messages.media import MediaItem, MediaSpan
from troupellm.protocol.messages.worker import SamplingState, StepResult, WorkerReady
from troupellm.protocol.params.guide import BuildOutcome, GuideProgram
from troupellm.protocol.params.pooling import PoolingState
from troupellm.protocol.params.sampling_checks import RepetitionDetection


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One of a request's n sequences."""

    row: int
    """Unique in the life of the engine; names the sequence in plans, results and outputs."""
    sampling: SamplingState
    generated: bytes = b""
    """int32 [tokens]: those that another engine has drawn for the sequence."""


class BeamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Beam search over a request's sequences, which are as many beams. See `SamplingParams` for the fields."""

    length_penalty: float = 1.0
    early_stopping: bool = False
    num_candidates: int
    """Continuations of each beam that a step looks at: twice the beams, and at least so many that tokens which end a
    sequence leave enough others."""
    logprobs: int = 0
    """Top alternatives to report with every token of the answers."""


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that passed validation. All its sequences share the prompt."""

    request: int
    """The engine's own number of the request."""
    request_id: str
    arrival: float
    """Seconds on the engine's clock."""
    prompt: bytes
    """int32 [prompt_tokens]."""
    sequences: tuple[SequenceSpec, ...]
    max_tokens: int
    """Resolved: never more than the context leaves."""
    min_tokens: int
    stop_token_ids: frozenset[int]
    """The request's own ids; their meeting is reported as `stop_reason`."""
    eos_token_ids: frozenset[int]
    """The model's end tokens; empty under ignore_eos."""
    priority: int = 0
    tenant: str = ""
    """The owner of the request, for fair shares, limits and the prefix cache; "" without tenants."""
    cache_salt: bytes = b""
    """Requests with the same salt share prefix-cache entries with each other and with no others; empty is no salt."""
    borders: tuple[int, ...] = ()
    """Tokens behind which another prompt may go on in another way, where it is known, ascending."""
    session: str = ""
    """The tenant's session that the request belongs to; empty: none."""
    leases: tuple[PrefixLease, ...] = ()
    """Prefixes of the prompt that are evicted after others."""
    prompt_keys: bytes = b""
    """Names of the prompt's full blocks in the prefix cache, 32 bytes each, after the root of their chain: made before
    the scheduler hears of the request. Empty: the scheduler makes them."""
    streaming: bool = True
    beam: BeamSettings | None = None
    """None draws the sequences independently."""
    pooling: PoolingState | None = None
    """None generates; otherwise the request ends with its prompt, and a vector. It has one sequence."""
    deadline: float | None = None
    """Seconds on the engine's clock after which a request that still waits is dropped."""
    repetition: RepetitionDetection | None = None
    embeddings: bytes | None = None
    """Input embeddings in place of the prompt's token ids, which are ignored then; float32 [prompt_tokens, hidden]."""
    adapter: AdapterRef | None = None
    """None: the model itself."""
    media: tuple[MediaSpan, ...] = ()
    """Positions of the prompt with embeddings of items, ascending."""
    items: tuple[MediaItem, ...] = ()
    """The items of those spans, each digest once."""


class StepFinished(msgspec.Struct, frozen=True):
    """From the worker: the plan's result."""

    result: StepResult


class AbortRequest(msgspec.Struct, frozen=True):
    """Idempotent; an unknown request is ignored."""

    request: int


class StopStringMet(msgspec.Struct, frozen=True):
    """From the output actor: this sequence's text is complete; what else was planned for it is discarded."""

    row: int


class ReaderPaused(msgspec.Struct, frozen=True):
    """The request's outbox is full: leave its sequences out of the next plans."""

    request: int


class ReaderResumed(msgspec.Struct, frozen=True):
    request: int


class ResetPrefixCache(msgspec.Struct, frozen=True):
    """Nothing that is computed or under way now may be found by a request that comes later."""

    external: bool = False
    """Nor what other engines share with this one."""
    done: Callable[[bool], None] = lambda ok: None
    """Called once: whether outer tiers have forgotten what they held. One that could not is not used before it has."""


class WriteOut(msgspec.Struct, frozen=True):
    """The engine stops and every request has ended: what is to go to outer tiers goes there now, halted or not."""

    written: Callable[[], None]
    """Called once, when nothing waits any more."""


class PausePlanning(msgspec.Struct, frozen=True):
    """Plan nothing more until `ResumePlanning`."""

    finish: bool
    """First what is here is finished; what comes meanwhile waits."""
    settled: Callable[[bool], None]
    """Called once: with True when no plan is in flight any more, with False when planning was resumed before, or when
    what is here cannot be finished since it stands still already."""


class ResumePlanning(msgspec.Struct, frozen=True):
    """Undo `PausePlanning`."""


class WorkerAsleep(msgspec.Struct, frozen=True):
    """From the worker actor: the worker has given its memory back, on request. No plan is in flight.

    Raises the engine epoch as `WorkerLost` does; `WorkerRestarted` ends it.
    """

    keeps_host: bool = False
    """The blocks of the host tier are still there."""


class WorkerLost(msgspec.Struct, frozen=True):
    """From the worker actor: every plan in flight is lost, and with it all that the worker's memory held.

    Each loss raises the engine epoch by one, here and in the worker actor, so that both count alike.
    """

    reason: str
    fault: bool = True
    """The worker failed by itself, so what it computed is under suspicion. False: it was killed from outside, or so it
    looks."""
    exhausted: bool = False
    """It found no memory, or was killed for want of it: smaller steps may pass."""


class WorkerRestarted(msgspec.Struct, frozen=True):
    """From the worker actor: a new worker is ready; what was running is computed again."""

    ready: WorkerReady


class GuideBuilt(msgspec.Struct, frozen=True):
    """From the guide actor: the answer to `BuildGuide`."""

    program: GuideProgram
    engine_epoch: int
    """Of the question. An answer about a lost worker counts for nothing."""
    outcome: BuildOutcome


class WantAdapter(msgspec.Struct, frozen=True):
    """From the adapter library: have the worker read an adapter that no request needs yet, when there is room for it.
    Answered by `ServeAdapter`."""

    digest: str
    folder: str


class AdapterLoaded(msgspec.Struct, frozen=True):
    """From the adapter library: the worker has read an adapter, or cannot."""

    digest: str
    engine_epoch: int
    """When the worker was asked. An answer of a lost worker counts for nothing."""
    preparation: AdapterPreparation


SchedulerMessage = SubmitRequest | StepFinished
SchedulerControl = (
    AbortRequest
    | StopStringMet
    | ReaderPaused
    | ReaderResumed
    | ResetPrefixCache
    | WriteOut
    | PausePlanning
    | ResumePlanning
    | WorkerAsleep
    | WorkerLost
    | WorkerRestarted
    | GuideBuilt
    | AdapterLoaded
    | WantAdapter
    | KeepTurn
    | PrefetchSession
    | DropSession
)
