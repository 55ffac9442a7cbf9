"""The text of `/metrics`: the store's counters, and gauges read from the live snapshot at the moment of the scrape.

Every family has a name of ours; those that vLLM has too are repeated under its exact name when asked.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from troupellm.actors.metrics.actor import Histogram, MetricsStore
from troupellm.actors.metrics.exposition_leases import lease_families
from troupellm.actors.metrics.exposition_tiers import ALIASES as OFFLOAD_ALIASES, offload_families
from troupellm.actors.metrics.families import counter, counters, gauge
from troupellm.protocol.messages.graph_report import GraphReport
from troupellm.protocol.messages.snapshot import EngineSnapshot, GuideSnapshot, KVEventsSnapshot, ProposerSnapshot

ALIASES = {
    "troupellm_requests_running": "vllm:num_requests_running",
    "troupellm_requests_waiting": "vllm:num_requests_waiting",
    "troupellm_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "troupellm_prefix_cache_queries": "vllm:prefix_cache_queries",
    "troupellm_prefix_cache_hits": "vllm:prefix_cache_hits",
    "troupellm_prompt_tokens": "vllm:prompt_tokens",
    "troupellm_generation_tokens": "vllm:generation_tokens",
    "troupellm_preemptions": "vllm:num_preemptions",
    "troupellm_requests_finished": "vllm:request_success",
    "troupellm_request_prompt_tokens": "vllm:request_prompt_tokens",
    "troupellm_request_generation_tokens": "vllm:request_generation_tokens",
    "troupellm_request_params_n": "vllm:request_params_n",
    "troupellm_request_params_max_tokens": "vllm:request_params_max_tokens",
    "troupellm_iteration_tokens": "vllm:iteration_tokens_total",
    "troupellm_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "troupellm_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "troupellm_request_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "troupellm_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "troupellm_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "troupellm_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "troupellm_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "troupellm_request_inference_time_seconds": "vllm:request_inference_time_seconds",
    "troupellm_spec_decode_drafts": "vllm:spec_decode_num_drafts",
    "troupellm_spec_decode_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "troupellm_spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "troupellm_spec_decode_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "troupellm_lora_requests_info": "vllm:lora_requests_info",
    "troupellm_cache_config_info": "vllm:cache_config_info",
    "troupellm_engine_sleep_state": "vllm:engine_sleep_state",
}
FINISH_REASONS = ("stop", "length", "abort", "error")
CANCELLED_BY = ("client", "stall", "shutdown", "admin")
SLEEP_STATES = {"awake": (None, 0), "weights_offloaded": (1,), "discard_all": (2,)}
"""By vLLM's names; at level 1 our weights stay where they are, and the KV cache is given back."""
_ENGINE = "0"


class _EngineCollector(Collector):
    def __init__(
        self, store: MetricsStore, snapshot: Callable[[], EngineSnapshot], cache_config: Mapping[str, str]
    ) -> None:
        self._store = store
        self._snapshot = snapshot
        self._cache_config = dict(cache_config)

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        base = {"model_name": snapshot.model, "engine": _ENGINE}
        yield from self._counters(base)
        yield from self._histograms(base)
        yield from self._gauges(base, snapshot)
        yield from _actor_families(base, snapshot)
        yield from _tenant_families(base, snapshot)
        yield from _guide_families(base, snapshot.guide)
        yield from _kv_event_families(base, snapshot.kv_events)
        yield from offload_families(base, snapshot.scheduler.offload)
        yield from lease_families(base, snapshot.scheduler.leases)
        yield from _proposer_families(base, snapshot.scheduler.proposer)
        yield from _graph_families(base, snapshot.scheduler.graphs)

    def _counters(self, base: Mapping[str, str]) -> Iterator[Metric]:
        store = self._store
        finished = {reason: store.finished[reason] for reason in (*FINISH_REASONS, *store.finished)}
        yield counter("prompt_tokens", "Prompt tokens of finished requests.", base, store.prompt_tokens)
        yield counter("generation_tokens", "Tokens generated.", base, store.generation_tokens)
        yield counter("preemptions", "Sequences put back to waiting for want of KV blocks.", base, store.preemptions)
        yield counter("prefix_cache_queries", "Prompt tokens looked up.", base, store.prefix_queries)
        yield counter("prefix_cache_hits", "Prompt tokens found in the cache.", base, store.prefix_hits)
        yield counters("requests_finished", "Requests by how they ended.", base, "finished_reason", finished)
        yield counters("rejected", "Requests refused before they were scheduled.", base, "reason", store.rejected)
        cancelled = {by: store.cancelled[by] for by in (*CANCELLED_BY, *store.cancelled)}
        yield counters("cancelled", "Requests ended before their answer was complete.", base, "by", cancelled)
        yield counters("batch_tokens", "Tokens computed.", base, "kind", store.batch_tokens)
        yield counter("spec_decode_drafts", "Times a sequence had drafts verified.", base, store.num_drafts)
        yield counter("spec_decode_draft_tokens", "Drafts verified.", base, store.draft_tokens)
        yield counter("spec_decode_accepted_tokens", "Drafts accepted.", base, store.accepted_tokens)
        accepted_at = {str(position): count for position, count in enumerate(store.accepted_at)}
        text = "Drafts accepted, by their position."
        yield counters("spec_decode_accepted_tokens_per_pos", text, base, "position", accepted_at)

    def _histograms(self, base: Mapping[str, str]) -> Iterator[Metric]:
        store = self._store
        for name, text, histogram in (
            ("iteration_tokens", "Tokens computed in a step.", store.iteration_tokens),
            ("time_to_first_token_seconds", "From arrival.", store.first_token),
            ("inter_token_latency_seconds", "Between tokens of a sequence.", store.inter_token),
            ("request_time_per_output_token_seconds", "Mean after the first token.", store.time_per_output_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", store.request_total),
            ("request_queue_time_seconds", "From arrival to the first step.", store.request_queue),
            ("request_prefill_time_seconds", "From the first step to the first token.", store.request_prefill),
            ("request_decode_time_seconds", "From the first token to the last.", store.request_decode),
            ("request_inference_time_seconds", "From the first step to the last token.", store.request_inference),
            ("request_prompt_tokens", "Prompt tokens.", store.request_prompt_tokens),
            ("request_generation_tokens", "Tokens generated.", store.request_generation_tokens),
            ("request_params_max_tokens", "Wanted tokens.", store.request_max_tokens),
            ("request_params_n", "Wanted answers.", store.request_n),
            ("session_cached_ratio", "Share of a session's prompt that was cached.", store.session_cached_ratio),
        ):
            family = HistogramMetricFamily(f"troupellm_{name}", text, labels=list(base))
            _add_histogram(family, list(base.values()), histogram)
            yield family
        phases = HistogramMetricFamily("troupellm_step_seconds", "Time of a step.", labels=[*base, "phase"])
        for phase, histogram in store.step_phases.items():
            _add_histogram(phases, [*base.values(), phase], histogram)
        yield phases

    def _gauges(self, base: Mapping[str, str], snapshot: EngineSnapshot) -> Iterator[Metric]:
        scheduler = snapshot.scheduler
        usage = scheduler.blocks_used / scheduler.blocks_total if scheduler.blocks_total else 0.0
        blocks = {"free": scheduler.blocks_free, "used": scheduler.blocks_used, "cached": scheduler.blocks_cached}
        yield gauge("requests_running", "Requests in the batch.", base, scheduler.running)
        yield gauge("requests_waiting", "Requests that wait to be scheduled.", base, scheduler.waiting)
        quarantined = scheduler.quarantined
        yield counter("worker_restarts", "Times that the worker was lost.", base, scheduler.worker_losses)
        yield counter(
            "prefix_cache_evictions", "Cached blocks given away for others.", base, scheduler.prefix_evictions
        )
        yield counter("replays", "Sequences computed again after the worker was lost.", base, scheduler.replays)
        yield counter("convicted", "Requests failed because they killed the worker.", base, scheduler.blamed)
        yield counter("dropped_results", "Late rows of results.", base, scheduler.dropped_results)
        yield gauge("requests_quarantined", "Requests suspected of killing the worker.", base, quarantined)
        yield gauge("requests_open", "Requests that have not ended.", base, snapshot.open_requests)
        yield gauge("streams_stalled", "Sequences paused because their reader is behind.", base, scheduler.paused)
        yield gauge("kv_cache_usage_ratio", "Share of the KV blocks in use.", base, usage)
        yield gauge("engine_paused", "Nothing is computed, by request.", base, float(scheduler.halted))
        asleep = GaugeMetricFamily(
            "troupellm_engine_sleep_state", "1 for the state that it is in.", labels=[*base, "sleep_state"]
        )
        for state, levels in SLEEP_STATES.items():
            asleep.add_metric([*base.values(), state], float(snapshot.sleep_level in levels))
        yield asleep
        family = GaugeMetricFamily("troupellm_kv_blocks", "KV blocks by state.", labels=[*base, "state"])
        for state, count in blocks.items():
            family.add_metric([*base.values(), state], count)
        yield family
        groups = GaugeMetricFamily(
            "troupellm_kv_group_blocks",
            "KV blocks by cache group and state; the free ones are for all groups.",
            labels=[*base, "group", "state"],
        )
        for group in scheduler.cache_groups:
            groups.add_metric([*base.values(), group.name, "used"], group.used)
            groups.add_metric([*base.values(), group.name, "cached"], group.cached)
        yield groups
        yield gauge("uptime_seconds", "Since the engine started.", base, snapshot.uptime_seconds)
        yield gauge(
            "ready",
            "1 while requests are accepted.",
            base,
            float(snapshot.state == "ready" and snapshot.unready is None),
        )
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield gauge("lora_requests_info", "Adapters in use.", {**base, **adapters}, 0.0)
        yield gauge("cache_config_info", "KV cache settings.", {**base, **self._cache_config}, 1.0)


def _actor_families(base: Mapping[str, str], snapshot: EngineSnapshot) -> Iterable[Metric]:
    labels = [*base, "actor"]
    depth = GaugeMetricFamily("troupellm_actor_mailbox_depth", "Messages that wait.", labels=labels)
    capacity = GaugeMetricFamily("troupellm_actor_mailbox_capacity", "Messages that may wait.", labels=labels)
    messages = CounterMetricFamily("troupellm_actor_mailbox_messages", "Messages accepted.", labels=labels)
    dropped = CounterMetricFamily("troupellm_actor_mailbox_dropped", "Messages refused.", labels=labels)
    restarts = CounterMetricFamily("troupellm_actor_restarts", "Restarts after a crash.", labels=labels)
    for actor in snapshot.actors:
        restarts.add_metric([*base.values(), actor.name], actor.restarts)
        for mailbox in actor.mailboxes:
            values = [*base.values(), mailbox.name]
            depth.add_metric(values, mailbox.depth)
            capacity.add_metric(values, mailbox.capacity)
            messages.add_metric(values, mailbox.messages)
            dropped.add_metric(values, mailbox.dropped)
    return depth, capacity, messages, dropped, restarts


def _kv_event_families(base: Mapping[str, str], events: KVEventsSnapshot | None) -> Iterator[Metric]:
    if events is not None:
        yield counter("kv_events", "Events of KV blocks, for routers.", base, events.reported)
        yield counter("kv_events_lost", "Those that slow readers have missed.", base, events.lost)
        yield gauge("kv_events_kept", "Events kept for readers who are behind.", base, events.kept)
        yield gauge("kv_events_findable_blocks", "Blocks that a snapshot for routers tells of.", base, events.findable)
        yield gauge("kv_events_waiting_readers", "Readers that wait for an event.", base, events.waiting_readers)


def _proposer_families(base: Mapping[str, str], proposer: ProposerSnapshot | None) -> Iterator[Metric]:
    if proposer is None:
        return
    text = (
        "Times that a plug-in which drafts raised, or gave what no drafts are: it is not called again, and nothing is "
        "drafted, until the model is loaded again. Requests go on without drafts; the log has the reason."
    )
    yield counter("spec_decode_proposer_failures", text, base, proposer.failures)
    if not proposer.past_tokens_capacity:
        return
    text = "Outputs of earlier requests that gave way to later ones."
    yield counter("spec_decode_past_evictions", text, base, proposer.past_evictions)
    for name, text, value in (
        ("outputs", "Outputs of earlier requests that are kept to draft from (method suffix).", proposer.past_outputs),
        ("tokens", "Tokens in these.", proposer.past_tokens),
        ("tokens_capacity", "Tokens that are kept at most, of all tenants together.", proposer.past_tokens_capacity),
        ("bytes", "Host memory reserved for these, for the texts of running rows, and to find them.",
         proposer.memory_bytes),
    ):  # fmt: skip
        yield gauge(f"spec_decode_past_{name}", text, base, value)


def _graph_families(base: Mapping[str, str], graphs: GraphReport | None) -> Iterator[Metric]:
    if graphs is None:
        return
    yield gauge("cuda_graphs", "Graphs that decode steps are replayed from.", base, graphs.captured)
    yield gauge("cuda_graphs_missing", "Graphs that are still to be captured.", base, graphs.missing)
    yield gauge("cuda_graphs_given_up", "Graphs that there is no memory to capture.", base, graphs.given_up)
    yield gauge("cuda_graph_bytes", "Device memory that the graphs take.", base, graphs.bytes)
    yield gauge("cuda_graph_capture_seconds", "What capturing them has taken.", base, graphs.seconds)


def _guide_families(base: Mapping[str, str], guide: GuideSnapshot) -> Iterable[Metric]:
    yield counter("guide_hits", "Requests whose guide was compiled already.", base, guide.hits)
    yield counter("guide_compiles", "Guides that were compiled.", base, guide.compiles)
    yield counter("guide_refused", "Requests whose guide cannot be served.", base, guide.refused)
    yield counter("guide_evictions", "Guides that left the cache for others.", base, guide.evicted)
    yield counter("guide_compile_seconds", "Time that compiling took.", base, guide.compile_seconds)
    yield gauge("guide_cached", "Guides in the cache, refusals among them.", base, guide.cached)
    yield gauge("guide_cache_bytes", "What they take.", base, guide.cached_bytes)
    yield gauge("guide_waiting", "Requests whose guide is being compiled.", base, guide.waiting)


def _tenant_families(base: Mapping[str, str], snapshot: EngineSnapshot) -> Iterable[Metric]:
    """Per API key; only names from the configuration are labels, so there are no more than it lists."""
    if not snapshot.tenants:
        return ()
    labels = [*base, "key"]
    inside = GaugeMetricFamily("troupellm_key_sequences", "Sequences inside the engine.", labels=labels)
    requests = CounterMetricFamily("troupellm_key_requests", "Requests that were let in.", labels=labels)
    limited = CounterMetricFamily("troupellm_key_limited", "Requests that the key's own limits refused.", labels=labels)
    prompt = CounterMetricFamily("troupellm_key_prompt_tokens", "Prompt tokens that were used.", labels=labels)
    generated = CounterMetricFamily("troupellm_key_generation_tokens", "Tokens that were generated.", labels=labels)
    for tenant in snapshot.tenants:
        values = [*base.values(), tenant.name]
        inside.add_metric(values, tenant.inside)
        requests.add_metric(values, tenant.requests)
        limited.add_metric(values, tenant.limited)
        prompt.add_metric(values, tenant.prompt_tokens)
        generated.add_metric(values, tenant.completion_tokens)
    return inside, requests, limited, prompt, generated


class Exposition:
    """One engine's private registry."""

    def __init__(
        self, store: MetricsStore, snapshot: Callable[[], EngineSnapshot], cache_config: Mapping[str, str]
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineCollector(store, snapshot, cache_config))

    def text(self, *, compat: bool) -> bytes:
        """Prometheus' text format."""
        return generate_latest(_Aliased(self.registry) if compat else self.registry)


class _Aliased(CollectorRegistry):
    """A registry whose families appear under vLLM's names too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(auto_describe=False)
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            alias = ALIASES.get(family.name) or OFFLOAD_ALIASES.get(family.name)
            if alias is not None:
                yield _renamed(family, alias)


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    copy.samples = [sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples]
    return copy


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    ends = [*(str(bound) for bound in histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(ends, accumulate(histogram.counts), strict=True)), histogram.total)
