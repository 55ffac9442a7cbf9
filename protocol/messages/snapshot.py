"""The published state of a running engine: plain numbers, safe to read at any time, no prompt text."""

import msgspec

from troupellm.protocol.messages.graph_report import GraphReport


class MailboxSnapshot(msgspec.Struct, frozen=True):
    name: str
    depth: int
    capacity: int
    messages: int
    """Accepted since the start."""
    dropped: int = 0


class CacheGroupSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table; the free blocks are for all groups."""

    name: str
    """Its number and kind, such as `1-sliding-512`."""
    used: int
    cached: int


class StatesSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of states beside the KV cache. Counts are since the start."""

    slots: int = 0
    bytes: int = 0
    """Of all slots."""
    used: int = 0
    """By running sequences."""
    snapshots: int = 0
    """States of prefixes that others can go on behind."""
    hits: int = 0
    """Sequences that began behind a snapshot."""
    evictions: int = 0
    """Snapshots whose slots were given away."""


class TierSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A tier of KV blocks behind the device. Counts are since the start, of blocks."""

    name: str
    """host, disk, or a connector's name."""
    blocks: int = 0
    """That it holds now; 0 where it does not know."""
    used_bytes: int = 0
    capacity_bytes: int = 0
    """0: not known."""
    lookups: int = 0
    """Asked for."""
    hits: int = 0
    misses: int = 0
    """Asked for and not there, or gone when they were fetched."""
    loads: int = 0
    """Moved from the tier towards the device."""
    stores: int = 0
    """Moved into it."""
    load_seconds: float = 0.0
    """In all, of the transfers by themselves."""
    store_seconds: float = 0.0
    moved_bytes: int = 0
    """Both ways."""
    evictions: int = 0
    """Blocks that gave way to others."""
    failures: int = 0
    corrupt: int = 0
    """Damaged blocks, which were not used."""
    dropped: int = 0
    """Blocks that were not stored, since too much was under way or there was no place."""
    disabled: str = ""
    """Why it is left alone for now."""
    disablings: int = 0
    late: int = 0
    """Operations that ended after they were given up."""


class OffloadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of the tiers behind the device, and who waits for them."""

    tiers: tuple[TierSnapshot, ...] = ()
    loading: int = 0
    """Sequences that wait for a tier."""
    transfers: int = 0
    """Under way."""
    lookups: int = 0
    """Under way."""
    waiting_spills: int = 0
    """Blocks that wait to go from host memory to outer tiers."""
    queried_tokens: int = 0
    """Looked up in the tiers, since the device did not have them."""
    hit_tokens: int = 0
    filtered: int = 0
    """Blocks that were not stored, since they were of too little use so far."""
    timeouts: int = 0
    """Sequences that went on without what a tier took too long for."""
    late: int = 0
    """Transfers and look-ups that ended after their request had stopped waiting."""


class LeaseSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of KV leases. Counts are since the start, of blocks unless they say otherwise."""

    leased_blocks: int = 0
    """Under a lease now, in use or cached."""
    budget: int = 0
    """That may be; 0: leases are off."""
    sessions: int = 0
    """Whose blocks are known by name."""
    forgotten_sessions: int = 0
    """That were forgotten for others, since there were too many."""
    ends: dict[str, int] = {}
    """Leases that have ended, by reason."""
    clipped: int = 0
    """That got no lease, since their key had as many as it may."""
    prefetched: dict[str, int] = {}
    """Blocks that prefetches asked for, by outcome."""


class ProposerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of who drafts. Counts are since the start."""

    failures: int = 0
    """Times that a plug-in raised, or gave what no drafts are: it is not called again until the model is loaded again.
    """
    past_outputs: int = 0
    """Outputs of earlier requests that are kept to draft from (method suffix), as of the last step."""
    past_tokens: int = 0
    past_tokens_capacity: int = 0
    """0: no outputs are kept."""
    past_evictions: int = 0
    """Outputs that gave way to later ones."""
    memory_bytes: int = 0
    """Reserved for texts and their indexes."""


class AdapterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of LoRA adapters in the worker. Counts are since the start."""

    slots: int = 0
    slots_used: int = 0
    """By sequences that run."""
    running: tuple[str, ...] = ()
    """Names of the adapters of sequences that run."""
    waiting: tuple[str, ...] = ()
    """Names of the adapters that other sequences wait for."""
    host: int = 0
    """Adapters in host memory."""
    loads: int = 0
    """Adapters that were read."""
    drops: int = 0
    """Adapters that left host memory for others."""
    slot_changes: int = 0


class EncodersSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of images in the scheduler. Counts are since the start."""

    encoded: int
    """Images."""
    hits: int
    """Images of plans whose embeddings the worker had."""
    evicted: int
    kept_vectors: int
    """Embeddings that the worker keeps."""


class SchedulerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    waiting: int = 0
    held: int = 0
    """Of those that wait, the ones that wait for nothing but their guide or adapter."""
    running: int = 0
    paused: int = 0
    waiting_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    """Neither in use nor holding a cached prefix."""
    blocks_cached: int = 0
    """Unused but holding a cached prefix; they can be evicted at once."""
    cache_groups: tuple[CacheGroupSnapshot, ...] = ()
    steps: int = 0
    preemptions: int = 0
    tokens_generated: int = 0
    drafts: int = 0
    """Times that a sequence had drafts verified."""
    draft_tokens: int = 0
    """Drafts that were verified."""
    accepted_draft_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_evictions: int = 0
    states: StatesSnapshot | None = None
    """None: the model has none."""
    """Cached blocks that were given away."""
    plans_in_flight: int = 0
    halted: bool = False
    """Nothing is planned, by request."""
    worker_losses: int = 0
    """Times that the worker was lost."""
    replays: int = 0
    """Sequences that were computed again because of it."""
    quarantined: int = 0
    """Requests that are suspected of having killed the worker."""
    blamed: int = 0
    """Requests that were failed for it."""
    dropped_results: int = 0
    """Rows of results that named nothing alive."""
    proposer: ProposerSnapshot | None = None
    """None: nothing is drafted."""
    offload: OffloadSnapshot | None = None
    """None: there are no tiers behind the device."""
    leases: LeaseSnapshot = LeaseSnapshot()
    adapters: AdapterSnapshot | None = None
    """None: no adapters are served."""
    encoders: EncodersSnapshot | None = None
    """None: no images are encoded."""
    graphs: GraphReport | None = None
    """As of the last step that said so; None: the worker has none."""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a sequence in a step in which it had drafts; 0.0 before the first."""
        return 1 + self.accepted_draft_tokens / self.drafts if self.drafts else 0.0

    @property
    def blocks_used(self) -> int:
        return self.blocks_total - self.blocks_free - self.blocks_cached


class GuideSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of the guide actor. Counts are since the start."""

    hits: int = 0
    """Requests whose guide was compiled already, or was just being compiled."""
    compiles: int = 0
    refused: int = 0
    """Requests whose guide cannot be served."""
    evicted: int = 0
    cached: int = 0
    """Guides that are kept, refusals among them."""
    cached_bytes: int = 0
    waiting: int = 0
    """Requests whose guide is being compiled."""
    compile_seconds: float = 0.0
    """In all."""


class MediaSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of the media actor. Counts are since its start."""

    prepared: int = 0
    """Images."""
    refused: int = 0
    """Images that cannot be served."""
    unavailable: int = 0
    """Images that could not be fetched."""
    hits: int = 0
    """Images that were prepared already."""
    processes_killed: int = 0
    """Over an image."""
    held_bytes: int = 0
    """Of prepared images that are kept or that requests hold."""
    kept_bytes: int = 0
    """Of those that are kept."""
    waiting: int = 0
    """Requests whose images are fetched or prepared."""


class ActorSnapshot(msgspec.Struct, frozen=True):
    name: str
    restarts: int
    mailboxes: tuple[MailboxSnapshot, ...]


class TenantSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of one API key that has a name in the configuration. Counts are since the start and exact."""

    name: str
    inside: int
    """Sequences inside the engine now."""
    requests: int
    limited: int
    """Requests that its own limits refused."""
    prompt_tokens: int
    """Of requests that ended after they had begun."""
    completion_tokens: int
    """Of requests that ended, however they ended, as their usage has it: without tokens behind stop strings."""


class KVEventsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Of the stream of KV events."""

    reported: int
    """Since the start."""
    kept: int
    """For readers who are behind."""
    lost: int
    """That readers heard of as a number alone, because they were too slow; of all readers together."""
    waiting_readers: int
    findable: int = 0
    """Blocks that a snapshot tells of."""


class ReplicaSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One engine process of a fleet."""

    number: int
    pid: int | None
    state: str
    """starting, ready, leaving, failed, stopped."""
    reason: str
    """Why it is not ready; empty: it is."""
    restarts: int
    requests: int
    """Open requests there."""
    work: int
    """Prompt tokens that its requests cost, as the router counts them."""
    known_blocks: int
    """KV blocks that the router knows it to hold."""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    state: str
    """starting, ready, draining, failed, stopped."""
    uptime_seconds: float
    model: str
    max_model_len: int
    open_requests: int
    scheduler: SchedulerSnapshot
    actors: tuple[ActorSnapshot, ...]
    unready: str | None = None
    """Why requests had better go elsewhere just now, though they are taken: the worker restarts, or nothing moves."""
    paused: bool = False
    """Requests wait, by request: nothing is computed."""
    sleep_level: int | None = None
    """None is awake; 0: nothing is computed, 1: the KV cache was given back, 2: the weights as well."""
    last_step_age_seconds: float | None = None
    """Seconds since a step finished; None before the first."""
    step_seconds: float | None = None
    """How long the worker has been computing since a step last ended or it became busy; None while it is idle."""
    tenants: tuple[TenantSnapshot, ...] = ()
    prompt_tokens_computed: int = 0
    """Without those found in the prefix cache."""
    worker_pid: int | None = None
    """The worker's process, when it has one of its own."""
    spare_worker_pid: int | None = None
    rank_pids: tuple[int, ...] = ()
    """The processes that share the model, the worker's first; empty where it has the whole model."""
    guide: GuideSnapshot = GuideSnapshot()
    media: MediaSnapshot | None = None
    """None: no images are taken."""
    kv_events: KVEventsSnapshot | None = None
    """None: they are off."""
    replicas: tuple[ReplicaSnapshot, ...] = ()
    """Of a fleet, whose sums the other fields are; empty: this is one engine."""
