"""Families of `/metrics` about the tiers of KV blocks behind the device; none where there are no tiers."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from troupellm.actors.metrics.families import counter, counters, gauge
from troupellm.protocol.messages.snapshot import OffloadSnapshot

ALIASES = {
    "troupellm_external_prefix_cache_queries": "vllm:external_prefix_cache_queries",
    "troupellm_external_prefix_cache_hits": "vllm:external_prefix_cache_hits",
    "troupellm_kv_offload_bytes": "vllm:kv_offload_total_bytes",
    "troupellm_kv_offload_seconds": "vllm:kv_offload_total_time",
}
_COUNTERS = (
    ("lookups", "lookups", "Blocks asked for."),
    ("hits", "hits", "Blocks asked for and found."),
    ("misses", "misses", "Blocks asked for that were not there, or had gone."),
    ("loads", "loads", "Blocks that came from the tier."),
    ("stores", "stores", "Blocks that went to the tier."),
    ("evictions", "evictions", "Blocks that gave way to others."),
    ("failures", "failures", "Transfers that failed."),
    ("corrupt", "corrupt", "Damaged blocks, which were not used."),
    ("dropped", "dropped", "Blocks that were not stored: too much was under way, or there was no place."),
    ("disablings", "disablings", "Times that the tier was left alone."),
    ("late", "late", "Operations that ended after they were given up."),
)
_GAUGES = (
    ("blocks", "blocks", "Blocks that the tier holds."),
    ("used_bytes", "used_bytes", "Bytes that they take."),
    ("capacity_bytes", "capacity_bytes", "Bytes that the tier may take; 0 is not known."),
)


def offload_families(base: Mapping[str, str], offload: OffloadSnapshot | None) -> Iterator[Metric]:
    if offload is None:
        return
    values = list(base.values())
    labels = [*base, "tier"]
    for name, attribute, text in _COUNTERS:
        by_tier = {tier.name: getattr(tier, attribute) for tier in offload.tiers}
        yield counters(f"kv_tier_{name}", text, base, "tier", by_tier)
    for name, attribute, text in _GAUGES:
        family = GaugeMetricFamily(f"troupellm_kv_tier_{name}", text, labels=labels)
        for tier in offload.tiers:
            family.add_metric([*values, tier.name], getattr(tier, attribute))
        yield family
    disabled = GaugeMetricFamily("troupellm_kv_tier_disabled", "1 while the tier is left alone.", labels=labels)
    for tier in offload.tiers:
        disabled.add_metric([*values, tier.name], float(bool(tier.disabled)))
    yield disabled
    yield from _moved(base, offload)
    for name, text, value in (
        ("external_prefix_cache_queries", "Tokens looked up behind the device.", offload.queried_tokens),
        ("external_prefix_cache_hits", "Tokens found there.", offload.hit_tokens),
        ("kv_offload_filtered", "Blocks that were not stored, since they were of too little use.", offload.filtered),
        ("kv_offload_timeouts", "Sequences that went on without what a tier was slow with.", offload.timeouts),
        ("kv_offload_late", "Transfers and look-ups that ended when nobody waited any more.", offload.late),
    ):
        yield counter(name, text, base, value)
    for name, text, value in (
        ("requests_loading", "Sequences that wait for a tier.", offload.loading),
        ("kv_offload_transfers", "Transfers under way.", offload.transfers),
        ("kv_offload_waiting_spills", "Blocks that wait to go to outer tiers.", offload.waiting_spills),
    ):
        yield gauge(name, text, base, value)


def _moved(base: Mapping[str, str], offload: OffloadSnapshot) -> Iterator[Metric]:
    """Bytes and seconds of the host tier's transfers, both ways, by vLLM's names of the ways."""
    host = offload.tiers[0]
    block_bytes = host.moved_bytes / max(1, host.loads + host.stores)
    ways = {"GPU_to_CPU": (host.stores, host.store_seconds), "CPU_to_GPU": (host.loads, host.load_seconds)}
    labels = [*base, "transfer_type"]
    moved = CounterMetricFamily("troupellm_kv_offload_bytes", "Moved from and to host memory.", labels=labels)
    taken = CounterMetricFamily(
        "troupellm_kv_offload_seconds", "What moving took, transfer by transfer.", labels=labels
    )
    for way, (blocks, seconds) in ways.items():
        moved.add_metric([*base.values(), way], blocks * block_bytes)
        taken.add_metric([*base.values(), way], seconds)
    yield moved
    yield taken
