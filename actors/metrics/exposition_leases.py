"""Families of `/metrics` about KV leases; none where they are off."""

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from troupellm.actors.metrics.families import counter, counters, gauge
from troupellm.protocol.config.kv_hints import LEASE_ENDS, PREFETCH_OUTCOMES
from troupellm.protocol.messages.snapshot import LeaseSnapshot


def lease_families(base: Mapping[str, str], leases: LeaseSnapshot) -> Iterator[Metric]:
    if not leases.budget:
        return
    ends = {reason: leases.ends.get(reason, 0) for reason in LEASE_ENDS}
    prefetched = {outcome: leases.prefetched.get(outcome, 0) for outcome in PREFETCH_OUTCOMES}
    yield gauge("kv_leased_blocks", "KV blocks that are evicted after others.", base, leases.leased_blocks)
    yield gauge("kv_leased_blocks_capacity", "KV blocks that may be.", base, leases.budget)
    yield counters("kv_lease_ends", "KV blocks whose leases ended, by why.", base, "reason", ends)
    yield counter("kv_lease_clipped", "KV blocks without a lease: their key had its share.", base, leases.clipped)
    yield counters("kv_prefetch", "KV blocks that prefetches asked for.", base, "outcome", prefetched)
    yield gauge("kv_sessions", "Sessions whose KV blocks are known by name.", base, leases.sessions)
    text = "Sessions that were forgotten for others."
    yield counter("kv_sessions_forgotten", text, base, leases.forgotten_sessions)
