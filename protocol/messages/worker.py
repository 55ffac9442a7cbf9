"""Messages between the scheduler and a worker: one plan down and one result up per step.

A worker keeps a table of *rows*, one per sequence that it was told about. A new row carries everything the worker
needs (tokens, sampling state, block tables); a known row carries differences only, and a plain decode row needs none:
it is four integers in the plan's columns. Columns are parallel tuples because a Struct per row would cost more than
the whole scheduling budget of a step.

Everything here is plain data: any message may cross a process border. Token ids travel as little-endian int32 bytes.
"""

from typing import Literal, Protocol

import msgspec

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.adapters import AdapterSlot as AdapterSlot
from troupellm.protocol.messages.copies import NO_STATE, BlockCopy as BlockCopy, StateCopy
from troupellm.protocol.messages.graph_report import GraphReport
from troupellm.protocol.messages.kv_transfers import (
    BlockTransfer,
    LookupDone,
    TierInfo,
    TierLookup,
    TierReport,
    TransferDone,
)
from troupellm.protocol.messages.media import MediaAbility, MediaItem, MediaSpan
from troupellm.protocol.messages.proposer_report import ProposerReport
from troupellm.protocol.messages.weight_file import WeightFile
from troupellm.protocol.params.guide import GuideProgram
from troupellm.protocol.params.logprobs import LogprobsMode
from troupellm.protocol.params.pooling import PoolingAbility, PoolingState

NULL_BLOCK = -1
"""Stands in a block table where a sequence has no block any more: all its positions lie behind a sliding window."""


class SamplingState(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """How a row's next tokens are chosen. Temperature 0 is greedy.

    The random draw for a token is a pure function of (seed, fork, position, purpose), so replay, preemption, another
    batch or another device give the same tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Unsigned 64 bit."""
    fork: int = 0
    """Which of a request's n sequences this is."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must never be completed."""
    min_tokens: int = 0
    """Until so many tokens were generated, `stop_token_ids` are masked."""
    stop_token_ids: tuple[int, ...] = ()
    """Only for the masking by min_tokens: the scheduler decides when a row ends."""
    logprobs: int = -1
    """How many top alternatives to report per generated token; -1 reports nothing, 0 the chosen token alone."""
    prompt_logprobs: int = -1
    """The same for every prompt token but the first."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report these instead of the top alternatives."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    thinking: "ThinkingState | None" = None
    processors: tuple[tuple[str, bytes], ...] = ()
    """Logits processors by name, each with its arguments as a JSON object."""
    guide: GuideProgram | None = None
    """The grammar of the generated tokens. It ends the row, too: see `StepResult.finished`."""


class ThinkingState(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """After `budget` tokens of thinking, however often it was taken up again, its end is forced."""

    budget: int
    open: bool | None
    """Whether the first generated token is a thought; None: the marks in the prompt decide."""
    starts: tuple[tuple[int, ...], ...]
    """Token sequences after which thinking has begun."""
    ends: tuple[tuple[int, ...], ...]
    """Those after which it is over; the first one is what is forced."""


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """A row that the worker does not know (or knew under an older epoch, which this one replaces)."""

    row: int
    epoch: int
    """Rises each time the sequence is given to the worker anew (after a preemption or a replay)."""
    request_id: str
    token_ids: bytes
    """Every token that the host knows, prompt first; int32 [known]."""
    num_prompt_tokens: int
    sampling: SamplingState
    blocks: tuple[tuple[int, ...], ...]
    """Block table per cache group."""
    adapter: int = 0
    """Adapter slot; 0 is the base model."""
    embeddings: bytes | None = None
    """Input embeddings in place of the prompt's token embeddings; float32 [num_prompt_tokens, hidden]."""
    pooling: PoolingState | None = None
    """None generates; otherwise the row samples nothing: when its last token is computed its vector comes back in
    `StepResult.pooled`."""
    state: int = NO_STATE
    """Its state slot, where the model has states."""
    media: tuple[MediaSpan, ...] = ()
    """Positions of its prompt with embeddings of items, ascending."""
    tenant: str = ""
    """Namespace of the data kept of its tokens: opaque, a different one for each tenant and each cache salt."""


class RowChange(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """The changes of a known row since the last plan that named it."""

    row: int
    dropped_blocks: int = 0
    """How many blocks leave the end of the row's tables before others come: a shared one that gives way to its copy."""
    appended_blocks: tuple[tuple[int, ...], ...] = ()
    """New block ids per cache group, to go at the end of the row's tables."""
    sampling: SamplingState | None = None


class RowFork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A known row goes on from another one (or from itself) with a token that the host has chosen: a step of a beam.

    The row keeps its number, its epoch and its sampling state. It takes over the parent's block tables as they are, so
    what it writes next must lie in blocks that a `RowChange` gives it.
    """

    row: int
    parent: int
    num_tokens: int
    """Tokens that are the parent's first ones."""
    token_id: int
    """The one behind them, with which the row's tokens end."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """The work of one step.

    `rows`, `epochs`, `starts` and `counts` are parallel. Row i computes positions starts[i] .. starts[i] + counts[i].
    A row samples when its span reaches the last token that the worker holds for it; the sampled token is appended to
    the row's tokens on the device at once, so the next plan may name its position before the host has seen it.

    Where drafts are verified the host cannot know how many tokens a plan in flight gives, so such a row is
    *speculative*: its `draft_limits` entry is not -1, its start is the host's lower bound, its count 1. The worker
    computes the row's next positions without KV, at most 1 + limit of them: first tokens that it holds, then its own
    drafts behind the last one. It samples when it reaches that. Blocks cover all positions that it may write.
    """

    step: int
    engine_epoch: int
    rows: tuple[int, ...]
    epochs: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    draft_limits: tuple[int, ...] = ()
    """Parallel to `rows`: -1 a row that computes just its span, else a speculative one and how many positions beyond
    one it may compute. Empty: no row is speculative."""
    new_rows: tuple[NewRow, ...] = ()
    changes: tuple[RowChange, ...] = ()
    freed_rows: tuple[int, ...] = ()
    """Rows to forget, before anything else is read from this plan."""
    forks: tuple[RowFork, ...] = ()
    """After new rows became known and before `changes`; all parents are read before any row is written."""
    copies: tuple[BlockCopy, ...] = ()
    states: tuple[StateCopy, ...] = ()
    """All sources are read before any target is written."""
    transfers: tuple[BlockTransfer, ...] = ()
    """Begun in this order with the step: stores read their blocks before anything of this plan is written."""
    lookups: tuple[TierLookup, ...] = ()
    cancelled: tuple[int, ...] = ()
    """Transfers that are not needed any more; the worker still answers them."""
    adapters: tuple[AdapterSlot, ...] = ()
    """Slots whose content changes before this step; no row of an earlier adapter of the slot is left."""
    forgotten: tuple[bytes, ...] = ()
    """Digests of items whose embeddings are not needed any more, dropped before others are made."""
    encode: tuple[MediaItem, ...] = ()
    """Items to encode before this step computes."""


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """Log-probabilities of consecutive tokens of a row.

    Column 0 is the token itself (sampled, or given in a prompt), the other `width - 1` are the top alternatives in
    falling order. Values are natural logs, floored at -9999 so that they are always valid JSON.
    """

    row: int
    position: int
    """Position in the sequence of the first token described."""
    width: int
    token_ids: bytes
    """int32 [tokens, width]."""
    logprobs: bytes
    """float32 [tokens, width]."""
    ranks: bytes
    """int32 [tokens]: 1 is the most likely token of the vocabulary."""
    other_ranks: bytes = b""
    """int32 [tokens, width - 1]: of the other columns, where they are no top alternatives; else empty."""


class RowPooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The vector of a pooled row: exactly once, with the span that reaches its last token."""

    row: int
    vector: bytes
    """float32."""


class RowError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """This row cannot go on; the rest of the step is fine."""

    row: int
    message: str
    code: str = "engine_request_failed"


class StepTimings(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """Seconds."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """The result of one plan. `rows`, `epochs` and `token_counts` are parallel and in the plan's order."""

    step: int
    engine_epoch: int
    rows: tuple[int, ...]
    epochs: tuple[int, ...]
    token_counts: tuple[int, ...]
    """New tokens per row: 0 for a prefill chunk in the middle, 1 for a plain decode, up to 1 + limit if it is
    speculative; behind them those that a guide forces."""
    tokens: tuple[int, ...]
    """All new tokens, row after row."""
    accepted: tuple[int, ...] = ()
    """Accepted drafts per row, at most as many as `drafted`; empty when nothing was drafted."""
    drafted: tuple[int, ...] = ()
    """Drafts per row that were verified, every node of a tree; empty when nothing was drafted."""
    logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    pooled: tuple[RowPooled, ...] = ()
    errors: tuple[RowError, ...] = ()
    finished: tuple[int, ...] = ()
    """Rows whose guide is complete with their last token here: nothing can follow it."""
    transfers: tuple[TransferDone, ...] = ()
    """Those of this and earlier plans that are over. A plan without rows, while any is under way, comes back when one
    is, or after a short while."""
    found: tuple[LookupDone, ...] = ()
    tiers: tuple[TierReport, ...] = ()
    """Of tiers where something has changed."""
    proposer: ProposerReport | None = None
    """None: nothing about it has changed."""
    timings: StepTimings = StepTimings()
    graphs: GraphReport | None = None
    """None: nothing about them has changed."""


class RestartWorker(msgspec.Struct, frozen=True):
    """To the worker actor, on its control lane: the worker is of no use any more (a reply was nonsense, or no step
    finishes). One of an engine epoch that is over is ignored: that worker was replaced already."""

    reason: str
    engine_epoch: int
    fault: bool = True
    """True if the worker failed by itself. If False, the plan may not have reached it, and no request is suspected."""


class ProcessorInfo(msgspec.Struct, frozen=True):
    """A logits processor that the worker has loaded."""

    name: str
    arguments: tuple[str, ...] = ()
    """Arguments that turn it on wherever a request gives them."""
    default: bytes | None = None
    """Its arguments for every request, as a JSON object; a request's own go over them. None: a request must ask."""


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table. A sliding window lets blocks behind it go.

    The groups' blocks are equally large and come from one pool: a block id belongs to one group at a time.
    """

    num_layers: int
    sliding_window: int | None = None
    """How many keys a token sees, itself included; None is all."""
    kind: Literal["full", "sliding", "latent"] = "full"
    """latent: one small vector per token, from which keys and values are made."""
    block_bytes: int = 0
    """The bytes that the group's layers keep in one block."""


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's settings after its load; the engine can serve from here on."""

    vocab_width: int
    """Width of the logits, which is what token ids are checked against."""
    max_model_len: int
    num_blocks: int
    """In the pool of all groups."""
    block_size: int
    groups: tuple[CacheGroup, ...]
    dtype: str
    """Of activations, and of what is not quantized."""
    device: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    memory_free_bytes: int
    load_seconds: float
    step_tokens: int = 0
    """Most tokens of a step: what groups with a window hold of a sequence follows from it. 0 was not said."""
    saturation_tokens: int = 0
    """From so many tokens on a step does no more of them per second; 0 was not measured."""
    saturation_seconds: float = 0.0
    """The time of a step of that many tokens."""
    generates: bool = True
    """Writes text."""
    pooling: PoolingAbility | None = None
    """The pooling tasks of the model; None if it has none."""
    whole_prompts: bool = False
    """Every token sees every other one: a prompt is computed in one step and serves no other. Blocks only count."""
    hidden_size: int = 0
    """Width of an input embedding; 0 if the model takes none."""
    logits_processors: tuple[ProcessorInfo, ...] = ()
    quantization: str = ""
    """Of weights; empty is none."""
    cache_dtype: str = "auto"
    """Of keys and values; auto is `dtype`."""
    most_drafts: int = 0
    """Drafts of a row that the worker verifies in one step, at most; 0: it drafts nothing, so no row is speculative."""
    state_slots: int = 0
    """States beside the KV cache, of sequences and snapshots; 0: the model has none."""
    state_bytes: int = 0  # of each of them
    max_loras: int = 0
    """Adapter slots, and so the adapters of one step, at most; 0: this model or device serves no adapters."""
    media: MediaAbility | None = None  # None: it encodes no images
    host_slots: int = 0
    """Blocks that the host tier holds; 0: there is none."""
    tiers: tuple[TierInfo, ...] = ()
    """Outer tiers, from number 1 on."""
    fingerprint: str = ""
    """Digest of all that a KV block's content depends on besides tokens; empty where no block outlives the engine."""
    weight_files: tuple[WeightFile, ...] = ()
    """As they were when the weights were read."""


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True):
    phase: str
    """resolve, download, weights, kv_cache, warm_up."""
    done: int = 0
    total: int = 0
    """Same unit as `done` (bytes or tensors); 0 is unknown."""
    detail: str = ""


class ProgressSink(Protocol):
    def __call__(self, progress: LoadProgress, /) -> None: ...


class LaunchedStep(Protocol):
    """An opaque handle of a plan that was launched; belongs to the worker that made it."""

    @property
    def step(self) -> int: ...


MOST_LAUNCHED = 2
"""Plans that may be launched before the first of them is collected; more are never sent."""


class Worker(Protocol):
    """The synchronous model side of the seam. All calls come from one thread.

    `launch` may return before the device has finished; two plans may be launched before the first is collected, and
    they are collected in order. A `WorksAhead` has each plan launched at once, also while another one is collected.
    `collect` computes or waits for what is not done. A row's failure is a `RowError`; a raised error is the step's.
    """

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady: ...
    def launch(self, plan: StepPlan) -> LaunchedStep: ...
    def collect(self, ticket: LaunchedStep) -> StepResult: ...
    def reset(self) -> None:
        """After a step that failed: forget every row and every plan, keep the weights. The cache's content is void."""

    def close(self) -> None: ...
