"""The families of an engine: one row each. Each table says its source, the argument of its rows' functions."""

from collections.abc import Callable, Iterable

from troupellm.actors.metrics.actor import MetricsStore
from troupellm.actors.metrics.families import counter, gauge, histogram
from troupellm.protocol.messages.snapshot import (
    ActorSnapshot,
    EngineSnapshot,
    ProposerSnapshot,
    StatesSnapshot,
    TenantSnapshot,
)

FINISH_REASONS = ("stop", "length", "abort", "error")
CANCELLED_BY = ("client", "stall", "shutdown", "admin")
SLEEP_STATES = {"awake": (None, 0), "weights_offloaded": (1,), "discard_all": (2,)}
"""By vLLM's names; at level 1 our weights stay where they are, and the KV cache is given back."""


def _finished(store: MetricsStore) -> dict[str, int]:
    return {reason: store.finished[reason] for reason in (*FINISH_REASONS, *store.finished)}


def _cancelled(store: MetricsStore) -> dict[str, int]:
    return {by: store.cancelled[by] for by in (*CANCELLED_BY, *store.cancelled)}


def _accepted_at(store: MetricsStore) -> dict[str, int]:
    return {str(position): count for position, count in enumerate(store.accepted_at)}


def _lora_requests(snapshot: EngineSnapshot) -> dict[tuple[str, str, str], float]:
    """As vLLM has it: names with commas between them, and when that was so."""
    adapters = snapshot.scheduler.adapters
    if adapters is None:
        return {("0", "", ""): 0.0}
    names = ",".join(adapters.running), ",".join(adapters.waiting)
    return {(str(adapters.slots), *names): snapshot.uptime_seconds}


STORE = (
    # `MetricsStore`
    counter("prompt_tokens", "Prompt tokens of finished requests.", "prompt_tokens", vllm="prompt_tokens"),
    counter("generation_tokens", "Tokens generated.", "generation_tokens", vllm="generation_tokens"),
    counter("preemptions", "Sequences put back to waiting for want of KV blocks.", "preemptions",
            vllm="num_preemptions"),
    counter("prefix_cache_queries", "Prompt tokens looked up.", "prefix_queries", vllm="prefix_cache_queries"),
    counter("prefix_cache_hits", "Prompt tokens found in the cache.", "prefix_hits", vllm="prefix_cache_hits"),
    counter("requests_finished", "Requests by how they ended.", _finished, "finished_reason", "request_success"),
    counter("rejected", "Requests refused before they were scheduled.", "rejected", "reason"),
    counter("cancelled", "Requests ended before their answer was complete.", _cancelled, "by"),
    counter("batch_tokens", "Tokens computed.", "batch_tokens", "kind"),
    counter("spec_decode_drafts", "Times a sequence had drafts verified.", "num_drafts", vllm="spec_decode_num_drafts"),
    counter("spec_decode_draft_tokens", "Drafts verified.", "draft_tokens", vllm="spec_decode_num_draft_tokens"),
    counter("spec_decode_accepted_tokens", "Drafts accepted.", "accepted_tokens",
            vllm="spec_decode_num_accepted_tokens"),
    counter("spec_decode_accepted_tokens_per_pos", "Drafts accepted, by their position.", _accepted_at, "position",
            "spec_decode_num_accepted_tokens_per_pos"),
    histogram("iteration_tokens", "Tokens computed in a step.", "iteration_tokens", vllm="iteration_tokens_total"),
    histogram("time_to_first_token_seconds", "From arrival.", "first_token", vllm="time_to_first_token_seconds"),
    histogram("inter_token_latency_seconds", "Between tokens of a sequence.", "inter_token",
              vllm="inter_token_latency_seconds"),
    histogram("request_time_per_output_token_seconds", "Mean after the first token.", "time_per_output_token",
              vllm="request_time_per_output_token_seconds"),
    histogram("e2e_request_latency_seconds", "From arrival to the end.", "request_total",
              vllm="e2e_request_latency_seconds"),
    histogram("request_queue_time_seconds", "From arrival to the first step.", "request_queue",
              vllm="request_queue_time_seconds"),
    histogram("request_prefill_time_seconds", "From the first step to the first token.", "request_prefill",
              vllm="request_prefill_time_seconds"),
    histogram("request_decode_time_seconds", "From the first token to the last.", "request_decode",
              vllm="request_decode_time_seconds"),
    histogram("request_inference_time_seconds", "From the first step to the last token.", "request_inference",
              vllm="request_inference_time_seconds"),
    histogram("request_prompt_tokens", "Prompt tokens.", "request_prompt_tokens", vllm="request_prompt_tokens"),
    histogram("request_generation_tokens", "Tokens generated.", "request_generation_tokens",
              vllm="request_generation_tokens"),
    histogram("request_params_max_tokens", "Wanted tokens.", "request_max_tokens", vllm="request_params_max_tokens"),
    histogram("request_params_n", "Wanted answers.", "request_n", vllm="request_params_n"),
    histogram("session_cached_ratio", "Share of a session's prompt that was cached.", "session_cached_ratio"),
    histogram("step_seconds", "Time of a step.", "step_phases", "phase"),
)  # fmt: skip


def _usage(snapshot: EngineSnapshot) -> float:
    scheduler = snapshot.scheduler
    return scheduler.blocks_used / scheduler.blocks_total if scheduler.blocks_total else 0.0


def _blocks(snapshot: EngineSnapshot) -> dict[str, int]:
    scheduler = snapshot.scheduler
    return {"free": scheduler.blocks_free, "used": scheduler.blocks_used, "cached": scheduler.blocks_cached}


def _group_blocks(snapshot: EngineSnapshot) -> dict[tuple[str, str], int]:
    groups = snapshot.scheduler.cache_groups
    return {(group.name, state): getattr(group, state) for group in groups for state in ("used", "cached")}


def _state_slots(states: StatesSnapshot) -> dict[str, int]:
    return {"used": states.used, "snapshot": states.snapshots, "free": states.slots - states.used - states.snapshots}


def _sleep_state(snapshot: EngineSnapshot) -> dict[str, float]:
    return {state: float(snapshot.sleep_level in levels) for state, levels in SLEEP_STATES.items()}


def _ready(snapshot: EngineSnapshot) -> float:
    return float(snapshot.state == "ready" and snapshot.unready is None)


ENGINE = (
    # `EngineSnapshot`
    gauge("requests_running", "Requests in the batch.", "scheduler.running", vllm="num_requests_running"),
    gauge("requests_waiting", "Requests that wait to be scheduled.", "scheduler.waiting", vllm="num_requests_waiting"),
    counter("worker_restarts", "Times that the worker was lost.", "scheduler.worker_losses"),
    counter("prefix_cache_evictions", "Cached blocks given away for others.", "scheduler.prefix_evictions"),
    counter("replays", "Sequences computed again after the worker was lost.", "scheduler.replays"),
    counter("convicted", "Requests failed because they killed the worker.", "scheduler.blamed"),
    counter("dropped_results", "Late rows of results.", "scheduler.dropped_results"),
    gauge("requests_quarantined", "Requests suspected of killing the worker.", "scheduler.quarantined"),
    gauge("requests_open", "Requests that have not ended.", "open_requests"),
    gauge("streams_stalled", "Sequences paused because their reader is behind.", "scheduler.paused"),
    gauge("kv_cache_usage_ratio", "Share of the KV blocks in use.", _usage, vllm="kv_cache_usage_perc"),
    gauge("engine_paused", "Nothing is computed, by request.", "scheduler.halted"),
    gauge("engine_sleep_state", "1 for the state that it is in.", _sleep_state, "sleep_state", "engine_sleep_state"),
    gauge("kv_blocks", "KV blocks by state.", _blocks, "state"),
    gauge("kv_group_blocks", "KV blocks by cache group and state; the free ones are for all groups.", _group_blocks,
          "group state"),
    gauge("uptime_seconds", "Since the engine started.", "uptime_seconds"),
    gauge("ready", "1 while requests are accepted.", _ready),
    gauge("lora_requests_info", "Adapters in use; the value is the uptime.", _lora_requests,
          "max_lora running_lora_adapters waiting_lora_adapters", "lora_requests_info"),
)  # fmt: skip
ADAPTERS = (
    # `AdapterSnapshot`
    gauge("lora_slots", "Adapter slots of the worker.", "slots"),
    gauge("lora_slots_used", "Slots whose adapter sequences run with.", "slots_used"),
    gauge("lora_adapters", "Adapters in the worker's host memory.", "host"),
    counter("lora_loads", "Adapters that the worker has read.", "loads"),
    counter("lora_evictions", "Adapters that left host memory for others.", "drops"),
    counter("lora_slot_changes", "Adapters that were put into a slot.", "slot_changes"),
)
STATES = (
    # `StatesSnapshot`
    gauge("state_slots", "Slots for states beside the KV cache, by state.", _state_slots, "state"),
    gauge("state_snapshots", "States of prefixes that sequences can go on behind.", "snapshots"),
    gauge("state_bytes", "Memory of all state slots.", "bytes"),
    counter("state_snapshot_hits", "Sequences that began behind a snapshot.", "hits"),
    counter("state_snapshot_evictions", "Snapshots whose slots were given away.", "evictions"),
)
GUIDE = (
    # `GuideSnapshot`
    counter("guide_hits", "Requests whose guide was compiled already.", "hits"),
    counter("guide_compiles", "Guides that were compiled.", "compiles"),
    counter("guide_refused", "Requests whose guide cannot be served.", "refused"),
    counter("guide_evictions", "Guides that left the cache for others.", "evicted"),
    counter("guide_compile_seconds", "Time that compiling took.", "compile_seconds"),
    gauge("guide_cached", "Guides in the cache, refusals among them.", "cached"),
    gauge("guide_cache_bytes", "What they take.", "cached_bytes"),
    gauge("guide_waiting", "Requests whose guide is being compiled.", "waiting"),
)  # fmt: skip
MEDIA = (
    # `MediaSnapshot`
    counter("media_prepared", "Images that were prepared.", "prepared"),
    counter("media_hits", "Images that were prepared already.", "hits"),
    counter("media_refused", "Images that cannot be served.", "refused"),
    counter("media_unavailable", "Images that could not be fetched.", "unavailable"),
    counter("media_processes_killed", "Processes that were lost over an image.", "processes_killed"),
    gauge("media_held_bytes", "Prepared images that are kept or that requests hold.", "held_bytes"),
    gauge("media_kept_bytes", "Prepared images that are kept.", "kept_bytes"),
    gauge("media_waiting", "Requests whose images are fetched or prepared.", "waiting"),
)
ENCODERS = (
    # `EncodersSnapshot`
    counter("encoder_images", "Images that the worker was told to encode.", "encoded"),
    counter("encoder_hits", "Images of steps whose embeddings the worker had.", "hits"),
    counter("encoder_evictions", "Images whose embeddings were given up for others.", "evicted"),
    gauge("encoder_kept_vectors", "Embeddings of images that the worker keeps.", "kept_vectors"),
)
KV_EVENTS = (
    # `KVEventsSnapshot`
    counter("kv_events", "Events of KV blocks, for routers.", "reported"),
    counter("kv_events_lost", "Those that slow readers have missed.", "lost"),
    gauge("kv_events_kept", "Events kept for readers who are behind.", "kept"),
    gauge("kv_events_findable_blocks", "Blocks that a snapshot for routers tells of.", "findable"),
    gauge("kv_events_waiting_readers", "Readers that wait for an event.", "waiting_readers"),
)  # fmt: skip
GRAPHS = (
    # `GraphReport`
    gauge("cuda_graphs", "Graphs that decode steps are replayed from.", "captured"),
    gauge("cuda_graphs_missing", "Graphs that are still to be captured.", "missing"),
    gauge("cuda_graphs_given_up", "Graphs that there is no memory to capture.", "given_up"),
    gauge("cuda_graph_bytes", "Device memory that the graphs take.", "bytes"),
    gauge("cuda_graph_capture_seconds", "What capturing them has taken.", "seconds"),
)  # fmt: skip


def _kept(attribute: str) -> Callable[[ProposerSnapshot], int | None]:
    """A number that there is where earlier outputs are kept to draft from."""

    def value(proposer: ProposerSnapshot) -> int | None:
        return getattr(proposer, attribute) if proposer.past_tokens_capacity else None

    return value


def _of_tenants(attribute: str) -> Callable[[Iterable[TenantSnapshot]], dict[str, int]]:
    return lambda tenants: {tenant.name: getattr(tenant, attribute) for tenant in tenants}


def _of_mailboxes(attribute: str) -> Callable[[Iterable[ActorSnapshot]], dict[str, int]]:
    return lambda actors: {box.name: getattr(box, attribute) for actor in actors for box in actor.mailboxes}


def _restarts(actors: Iterable[ActorSnapshot]) -> dict[str, int]:
    return {actor.name: actor.restarts for actor in actors}


PROPOSER = (
    # `ProposerSnapshot`
    counter("spec_decode_proposer_failures",
            "Times that a plug-in which drafts raised, or gave what no drafts are: it is not called again, and nothing "
            "is drafted, until the model is loaded again. Requests go on without drafts; the log has the reason.",
            "failures"),
    counter("spec_decode_past_evictions", "Outputs of earlier requests that gave way to later ones.",
            _kept("past_evictions")),
    gauge("spec_decode_past_outputs", "Outputs of earlier requests that are kept to draft from (method suffix).",
          _kept("past_outputs")),
    gauge("spec_decode_past_tokens", "Tokens in these.", _kept("past_tokens")),
    gauge("spec_decode_past_tokens_capacity", "Tokens that are kept at most, of all tenants together.",
          _kept("past_tokens_capacity")),
    gauge("spec_decode_past_bytes", "Host memory reserved for these, for the texts of running rows, and to find them.",
          _kept("memory_bytes")),
)  # fmt: skip
TENANTS = (
    # `TenantSnapshot`s. Only names from the configuration are labels, so there are no more than it lists.
    gauge("key_sequences", "Sequences inside the engine.", _of_tenants("inside"), "key"),
    counter("key_requests", "Requests that were let in.", _of_tenants("requests"), "key"),
    counter("key_limited", "Requests that the key's own limits refused.", _of_tenants("limited"), "key"),
    counter("key_prompt_tokens", "Prompt tokens that were used.", _of_tenants("prompt_tokens"), "key"),
    counter("key_generation_tokens", "Tokens that were generated.", _of_tenants("completion_tokens"), "key"),
)  # fmt: skip
ACTORS = (
    # `ActorSnapshot`s
    gauge("actor_mailbox_depth", "Messages that wait.", _of_mailboxes("depth"), "actor"),
    gauge("actor_mailbox_capacity", "Messages that may wait.", _of_mailboxes("capacity"), "actor"),
    counter("actor_mailbox_messages", "Messages accepted.", _of_mailboxes("messages"), "actor"),
    counter("actor_mailbox_dropped", "Messages refused.", _of_mailboxes("dropped"), "actor"),
    counter("actor_restarts", "Restarts after a crash.", _restarts, "actor"),
)  # fmt: skip
