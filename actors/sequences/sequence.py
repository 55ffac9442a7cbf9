"""Sequences, the requests they belong to, and the life-cycle as a literal table.

                     .------------ pause ------------.
                     v                               |
    WAITING --start--> RUNNING --pause--> PAUSED     |        any live state --stop, abort, fail--> FINISHING
       ^  ^               | preempt ^--resume-'| preempt      FINISHING --release--> FINISHED
       |  '--- start -----v                    v
       |            PREEMPTED ----pause----> HELD
       '------------------------------resume--'

    WAITING, PREEMPTED --load--> LOADING --start--> RUNNING        LOADING --wait--> WAITING, --preempt--> PREEMPTED

WAITING and PREEMPTED sequences are in the waiting queue (or wait for a sibling to compute their prompt); PAUSED and
HELD ones have a reader that does not read, with and without blocks. LOADING ones wait for an outer tier: without blocks
while it is asked what it has, or with blocks that are being loaded. FINISHING has ended for its reader, but a plan in
flight may still write its blocks.
"""

import enum
from array import array
from typing import Final

from troupellm.actors.sequences.beam_search import BeamSearch
from troupellm.actors.sequences.parts import DraftCounts, HostHit, Repetition, SharedPrompt
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.scheduler import SubmitRequest
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.outputs import CachedTokens, FinishReason


class State(enum.Enum):
    WAITING = "waiting"
    HELD = "held"
    LOADING = "loading"
    RUNNING = "running"
    PAUSED = "paused"
    PREEMPTED = "preempted"
    FINISHING = "finishing"
    FINISHED = "finished"


class Event(enum.Enum):
    START = "start"
    LOAD = "load"
    WAIT = "wait"
    PREEMPT = "preempt"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    ABORT = "abort"
    FAIL = "fail"
    RELEASE = "release"


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.WAITING, Event.START): State.RUNNING,
    (State.WAITING, Event.LOAD): State.LOADING,
    (State.WAITING, Event.PAUSE): State.HELD,
    (State.WAITING, Event.STOP): State.FINISHING,
    (State.WAITING, Event.ABORT): State.FINISHING,
    (State.WAITING, Event.FAIL): State.FINISHING,
    (State.LOADING, Event.START): State.RUNNING,
    (State.LOADING, Event.WAIT): State.WAITING,
    (State.LOADING, Event.PREEMPT): State.PREEMPTED,
    (State.LOADING, Event.STOP): State.FINISHING,
    (State.LOADING, Event.ABORT): State.FINISHING,
    (State.LOADING, Event.FAIL): State.FINISHING,
    (State.HELD, Event.RESUME): State.WAITING,
    (State.HELD, Event.STOP): State.FINISHING,
    (State.HELD, Event.ABORT): State.FINISHING,
    (State.HELD, Event.FAIL): State.FINISHING,
    (State.RUNNING, Event.PREEMPT): State.PREEMPTED,
    (State.RUNNING, Event.PAUSE): State.PAUSED,
    (State.RUNNING, Event.STOP): State.FINISHING,
    (State.RUNNING, Event.ABORT): State.FINISHING,
    (State.RUNNING, Event.FAIL): State.FINISHING,
    (State.PAUSED, Event.PREEMPT): State.HELD,
    (State.PAUSED, Event.RESUME): State.RUNNING,
    (State.PAUSED, Event.STOP): State.FINISHING,
    (State.PAUSED, Event.ABORT): State.FINISHING,
    (State.PAUSED, Event.FAIL): State.FINISHING,
    (State.PREEMPTED, Event.START): State.RUNNING,
    (State.PREEMPTED, Event.LOAD): State.LOADING,
    (State.PREEMPTED, Event.PAUSE): State.HELD,
    (State.PREEMPTED, Event.STOP): State.FINISHING,
    (State.PREEMPTED, Event.ABORT): State.FINISHING,
    (State.PREEMPTED, Event.FAIL): State.FINISHING,
    (State.FINISHING, Event.RELEASE): State.FINISHED,
}

NO_EPOCH: Final = -1
"""Epoch of a sequence that has ended: no result can match it."""
NO_STEP: Final = -1


class LifecycleError(RuntimeError):
    """An event that the state has no row for: a bug of ours."""


class LastToken:
    """When a sequence had its last token, in seconds; 0 before the first. Those that decode together share one."""

    __slots__ = ("at",)

    def __init__(self, at: float = 0.0) -> None:
        self.at = at


class TierState:
    """The state of a sequence's blocks in the tiers behind the device."""

    __slots__ = ("asked", "asks_again", "brought", "gave_up", "host_hits", "loading", "num_offered", "rounds")

    def __init__(self) -> None:
        self.num_offered = 0
        """Of the full blocks that others can find, how many the tiers were offered."""
        self.host_hits: list[HostHit] = []
        """Blocks to load for the sequence, between their admission and the load."""
        self.loading: object | None = None
        """The state of its load while it is LOADING; belongs to the module that does the loading."""
        self.asked = False
        """Outer tiers were asked for its blocks since it ran last."""
        self.asks_again = False
        """Outer tiers have more than could be fetched at once: they are asked again once that is loaded."""
        self.rounds = 0
        """How often it has done so."""
        self.brought: dict[str, int] = {}
        """Tokens that came from tiers before it asked again, by kind of tier."""
        self.gave_up = False
        """A tier did not give what it has: the sequence does without tiers until it runs."""


class Request:
    """The state that a request's sequences share."""

    __slots__ = (
        "adapter",
        "arrival",
        "borders",
        "cached_sources",
        "cached_tokens",
        "drafts",
        "embeddings",
        "error",
        "first_token",
        "items",
        "lease_owner",
        "leases",
        "marks",
        "max_tokens",
        "media",
        "num_going",
        "num_live",
        "num_prompt_tokens",
        "number",
        "owner",
        "paused",
        "prompt",
        "prompt_computed",
        "prompt_keys",
        "reason",
        "request_id",
        "scheduled",
        "search",
        "sequences",
        "session",
        "shared_prompt",
        "stop_or_eos",
        "streaming",
        "tenant",
    )

    def __init__(self, message: SubmitRequest, prompt_keys: list[bytes], *, tenant: str = "") -> None:
        """
        Args:
            prompt_keys: the root of the prefix cache's key chain, then a key per full block; none without that cache.
            tenant: whose share it is served from.
        """
        self.number, self.request_id = message.request, message.request_id
        self.tenant = tenant
        self.owner = ""
        """As `NewRow.tenant`."""
        self.lease_owner, self.session, self.leases = message.tenant, message.session, message.leases
        self.adapter = message.adapter
        self.streaming, self.arrival = message.streaming, message.arrival
        self.media, self.items = message.media, {item.digest: item for item in message.items}
        self.marks: dict[int, bytes] = {}
        """Of the prompt's blocks with embeddings of images, by their numbers."""
        self.max_tokens, self.prompt = message.max_tokens, message.prompt
        """int32 [prompt_tokens]."""
        self.embeddings = message.embeddings
        """Embeddings instead of the prompt's tokens; float32 [prompt_tokens, hidden]."""
        self.num_prompt_tokens = len(message.prompt) // 4
        self.borders: tuple[int, ...] = ()
        """Where snapshots of its state are made, by the tokens before them."""
        self.stop_or_eos = message.stop_token_ids | message.eos_token_ids
        self.prompt_keys = prompt_keys
        self.sequences: tuple[Sequence, ...] = ()
        self.num_live = 0
        """Sequences that are not FINISHED."""
        self.num_going = 0
        """Sequences that have not ended."""
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.cached_tokens = 0
        self.drafts: DraftCounts | None = None
        """The counts of its drafts, once there were any."""
        self.cached_sources: CachedTokens | None = None
        self.prompt_computed = False
        """The prompt's blocks are there: siblings need not wait any more."""
        self.shared_prompt: SharedPrompt | None = None
        """Blocks that siblings without blocks will share; the request holds a reference to each of them."""
        self.search: BeamSearch | None = None
        """The sequences are beams: each step decides for all of them together which go on and how."""
        self.paused = False
        self.error: TroupeError | None = None
        self.reason: FinishReason | None = None
        """Of the sequence that ended last."""

    @property
    def adapter_name(self) -> str:
        """Empty: the model itself."""
        return "" if self.adapter is None else self.adapter.name


class Sequence:
    """One row. Attributes are public to this package; only `handle` changes the state."""

    __slots__ = (
        "arrival_key",
        "cache_age",
        "capacity",
        "decoding",
        "draft_limit",
        "eos_token_ids",
        "epoch",
        "forced",
        "guide_rebuilt",  # the guide was used up once, and built again
        "is_beam",
        "keys",
        "known_to_worker",
        "last_step",
        "last_token",
        "limit",
        "min_tokens",
        "no_check_until",
        "num_cached_blocks",
        "num_computed",
        "num_confirmed_prefill",
        "num_lookahead_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "paid",
        "pooling",
        "repetition",
        "request",
        "row",
        "sampling",
        "state",
        "stop_or_eos",
        "tables",
        "tiers",
        "tokens",
        "was_preempted",
    )

    def __init__(
        self,
        request: Request,
        row: int,
        sampling: SamplingState,
        tokens: "array[int]",
        message: SubmitRequest,
        *,
        limit: int,
        num_groups: int,
        arrival_key: tuple[int, int, int],
    ) -> None:
        self.request, self.row, self.sampling, self.state = request, row, sampling, State.WAITING
        self.arrival_key = arrival_key
        """Order of service: smaller is served first and preempted last."""
        self.epoch = 0
        self.tokens = tokens
        """Prompt and generated tokens, int32, as far as the host knows them."""
        self.num_prompt_tokens = request.num_prompt_tokens
        self.limit = limit
        """The sequence ends when it has so many tokens, prompt included."""
        self.min_tokens = message.min_tokens
        watch = message.repetition
        self.repetition = None if watch is None else Repetition(watch, tokens, request.num_prompt_tokens)
        self.eos_token_ids = message.eos_token_ids
        self.stop_or_eos = request.stop_or_eos
        self.num_computed = 0
        """Positions whose KV is computed or will be by a plan in flight; of a speculative row at least so many."""
        self.num_lookahead_tokens = 0
        """Positions beyond those that plans in flight may compute for a speculative row."""
        self.draft_limit = 0
        """How many of them the newest plan may."""
        self.num_confirmed_prefill = 0
        """Positions of the current prefill whose plans have returned."""
        self.decoding = False
        """A token has come back since the sequence was last given to the worker."""
        self.forced = 0
        """Tokens that came behind a drawn one and that no plan that has returned computed: its guide forced them."""
        self.no_check_until = -1
        """While num_computed + slack < fence, the next plan may take one more position without further checks."""
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.capacity = 0
        """Positions that the block tables cover."""
        self.keys = request.prompt_keys.copy()
        """Root of the prefix cache's key chain, then the keys of the first full blocks."""
        self.num_cached_blocks = 0
        """Full blocks that others can find."""
        self.tiers = TierState()
        self.was_preempted = self.guide_rebuilt = False
        """Since it ran last."""
        self.cache_age = 0
        """How often the prefix cache had been reset when the sequence was given its blocks."""
        self.paid = False
        """Its tenant was charged for what it computes of its tokens."""
        self.num_prompt_logprobs = 0
        """Prompt positions before this one have had their log-probabilities delivered."""
        self.last_step = NO_STEP
        """The newest plan that names the sequence."""
        self.last_token, self.known_to_worker = LastToken(), False
        self.pooling = message.pooling
        """None generates; otherwise the sequence ends with its prompt, and a vector instead of a token."""
        self.is_beam = message.beam is not None
        """The host chooses its tokens, when its siblings have come as far: it is never planned beyond those it has."""

    @property
    def ended(self) -> bool:
        """Nothing more is shown of it."""
        return self.state is State.FINISHING or self.state is State.FINISHED

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_wanted(self) -> int:
        """Tokens to compute when the sequence starts, as far as that is known without the prefix cache."""
        shared_prompt = self.request.shared_prompt
        return len(self.tokens) if shared_prompt is None else max(1, len(self.tokens) - shared_prompt.num_positions)

    @property
    def waits_for_siblings(self) -> bool:
        """A beam that has computed all it has."""
        return self.is_beam and self.num_computed >= len(self.tokens)

    @property
    def num_confirmed(self) -> int:
        """Positions whose KV is certainly computed and whose tokens the host knows."""
        return len(self.tokens) - 1 - self.forced if self.decoding else self.num_confirmed_prefill

    @property
    def reads_prefix_cache(self) -> bool:
        """Positions that are pooled, or whose log-probabilities are still owed, must be computed, not looked up."""
        if self.pooling is not None:
            return self.pooling.reads_prefix_cache
        return self.sampling.prompt_logprobs < 0 or self.num_prompt_logprobs >= self.num_prompt_tokens

    def handle(self, event: Event) -> None:
        """Move along the table.

        Raises:
            LifecycleError: the table has no such row.
        """
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise LifecycleError(f"row {self.row} is {self.state.value} and got {event.value}")
        self.state = state

    def reset_no_check(self) -> None:
        """All known tokens are planned: from here each plan takes one position, within the blocks and the limit."""
        self.no_check_until = -1 if self.is_beam else min(self.capacity, self.limit - 1)

    def become(self, parent: "Sequence") -> None:
        """Take over what another sequence has: tokens, computation, and its blocks, to which there are references."""
        self.tokens, self.keys = parent.tokens[:], parent.keys.copy()
        self.tables = [table.copy() for table in parent.tables]
        self.capacity, self.cache_age, self.num_cached_blocks = (
            parent.capacity,
            parent.cache_age,
            parent.num_cached_blocks,
        )
        self.tiers.num_offered = parent.tiers.num_offered
        self.num_computed, self.num_confirmed_prefill = parent.num_computed, parent.num_confirmed_prefill
        self.decoding, self.no_check_until, self.num_lookahead_tokens = parent.decoding, -1, parent.num_lookahead_tokens

    def forget_computation(self) -> None:
        """Back to tokens alone, for another start under the next epoch."""
        self.epoch += 1
        self.num_computed = self.num_confirmed_prefill = self.num_cached_blocks = self.capacity = (
            self.num_lookahead_tokens
        ) = 0
        self.tiers.num_offered = self.forced = 0
        self.decoding = False
        self.no_check_until = -1
        self.tables = [[] for _ in self.tables]
