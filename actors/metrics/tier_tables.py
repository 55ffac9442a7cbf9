"""The families of the tiers of KV blocks behind the device, and of KV leases: one row each."""

from collections.abc import Callable

from troupellm.actors.metrics.families import counter, gauge
from troupellm.protocol.config.kv_hints import LEASE_ENDS, PREFETCH_OUTCOMES
from troupellm.protocol.messages.snapshot import LeaseSnapshot, OffloadSnapshot


def _of_tiers(attribute: str, kind: type[int | bool] = int) -> Callable[[OffloadSnapshot], dict[str, int]]:
    return lambda offload: {tier.name: kind(getattr(tier, attribute)) for tier in offload.tiers}


def _moved_bytes(offload: OffloadSnapshot) -> dict[str, float]:
    """Of the host tier's transfers, by vLLM's names of the ways."""
    host = offload.tiers[0]
    block_bytes = host.moved_bytes / max(1, host.loads + host.stores)
    return {"GPU_to_CPU": host.stores * block_bytes, "CPU_to_GPU": host.loads * block_bytes}


def _moved_seconds(offload: OffloadSnapshot) -> dict[str, float]:
    host = offload.tiers[0]
    return {"GPU_to_CPU": host.store_seconds, "CPU_to_GPU": host.load_seconds}


def _lease_ends(leases: LeaseSnapshot) -> dict[str, int]:
    return {reason: leases.ends.get(reason, 0) for reason in LEASE_ENDS}


def _prefetched(leases: LeaseSnapshot) -> dict[str, int]:
    return {outcome: leases.prefetched.get(outcome, 0) for outcome in PREFETCH_OUTCOMES}


OFFLOAD = (
    # `OffloadSnapshot`
    counter("kv_tier_lookups", "Blocks asked for.", _of_tiers("lookups"), "tier"),
    counter("kv_tier_hits", "Blocks asked for and found.", _of_tiers("hits"), "tier"),
    counter("kv_tier_misses", "Blocks asked for that were not there, or had gone.", _of_tiers("misses"), "tier"),
    counter("kv_tier_loads", "Blocks that came from the tier.", _of_tiers("loads"), "tier"),
    counter("kv_tier_stores", "Blocks that went to the tier.", _of_tiers("stores"), "tier"),
    counter("kv_tier_evictions", "Blocks that gave way to others.", _of_tiers("evictions"), "tier"),
    counter("kv_tier_failures", "Transfers that failed.", _of_tiers("failures"), "tier"),
    counter("kv_tier_corrupt", "Damaged blocks, which were not used.", _of_tiers("corrupt"), "tier"),
    counter("kv_tier_dropped", "Blocks that were not stored: too much was under way, or there was no place.",
            _of_tiers("dropped"), "tier"),
    counter("kv_tier_disablings", "Times that the tier was left alone.", _of_tiers("disablings"), "tier"),
    counter("kv_tier_late", "Operations that ended after they were given up.", _of_tiers("late"), "tier"),
    gauge("kv_tier_blocks", "Blocks that the tier holds.", _of_tiers("blocks"), "tier"),
    gauge("kv_tier_used_bytes", "Bytes that they take.", _of_tiers("used_bytes"), "tier"),
    gauge("kv_tier_capacity_bytes", "Bytes that the tier may take; 0 is not known.", _of_tiers("capacity_bytes"),
          "tier"),
    gauge("kv_tier_disabled", "1 while the tier is left alone.", _of_tiers("disabled", bool), "tier"),
    counter("kv_offload_bytes", "Moved from and to host memory.", _moved_bytes, "transfer_type",
            "kv_offload_total_bytes"),
    counter("kv_offload_seconds", "Time of each transfer.", _moved_seconds, "transfer_type",
            "kv_offload_total_time"),
    counter("external_prefix_cache_queries", "Tokens looked up behind the device.", "queried_tokens",
            vllm="external_prefix_cache_queries"),
    counter("external_prefix_cache_hits", "Tokens found there.", "hit_tokens", vllm="external_prefix_cache_hits"),
    counter("kv_offload_filtered", "Blocks that were not stored, since they were of too little use.", "filtered"),
    counter("kv_offload_timeouts", "Sequences that went on without what a tier was slow with.", "timeouts"),
    counter("kv_offload_late", "Transfers and look-ups that ended after the wait for them.", "late"),
    gauge("requests_loading", "Sequences that wait for a tier.", "loading"),
    gauge("kv_offload_transfers", "Transfers under way.", "transfers"),
    gauge("kv_offload_waiting_spills", "Blocks that wait to go to outer tiers.", "waiting_spills"),
)  # fmt: skip
LEASES = (
    # `LeaseSnapshot`
    gauge("kv_leased_blocks", "KV blocks that are evicted after others.", "leased_blocks"),
    gauge("kv_leased_blocks_capacity", "KV blocks that may be.", "budget"),
    counter("kv_lease_ends", "KV blocks whose leases ended, by why.", _lease_ends, "reason"),
    counter("kv_lease_clipped", "KV blocks without a lease: their key had its share.", "clipped"),
    counter("kv_prefetch", "KV blocks that prefetches asked for.", _prefetched, "outcome"),
    gauge("kv_sessions", "Sessions whose KV blocks are known by name.", "sessions"),
    counter("kv_sessions_forgotten", "Sessions that were forgotten for others.", "forgotten_sessions"),
)  # fmt: skip
