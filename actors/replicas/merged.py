"""Reports of a fleet's replicas as one: snapshots, metrics, answers of admin routes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from troupellm.actors.metrics.families import counter, gauge
from troupellm.protocol.messages.snapshot import EngineSnapshot, ReplicaSnapshot, SchedulerSnapshot

SUMMED: Final = frozenset({"abort", "kv_prefetch", "kv_drop"})
"""Actions whose answers are counts of each replica; the answers of the others are the same everywhere."""
OF_ONE: Final = frozenset(
    {"find_adapter", "list_adapters", "server_info", "log_level", "is_paused", "is_sleeping", "live_view"}
)
"""Actions that change nothing: one replica answers for all."""


def merged_snapshot(
    snapshots: Sequence[EngineSnapshot], replicas: Sequence[ReplicaSnapshot], **own: Any
) -> EngineSnapshot:
    """
    Args:
        snapshots: of the replicas that are ready.
        own: fields that the fleet knows itself.
    """
    first = snapshots[0] if snapshots else _NONE
    ages = [each.last_step_age_seconds for each in snapshots if each.last_step_age_seconds is not None]
    steps = [each.step_seconds for each in snapshots if each.step_seconds is not None]
    missing = [f"replica {each.number}: {each.reason}" for each in replicas if each.reason]
    return msgspec.structs.replace(
        first,
        scheduler=_merged_scheduler([each.scheduler for each in snapshots]),
        unready="; ".join(missing) if len(missing) == len(replicas) else None,
        paused=any(each.paused for each in snapshots),
        last_step_age_seconds=min(ages, default=None),
        step_seconds=min(steps) if snapshots and len(steps) == len(snapshots) else None,  # one that works is enough
        prompt_tokens_computed=sum(each.prompt_tokens_computed for each in snapshots),
        replicas=tuple(replicas),
        **own,
    )


def _merged_scheduler(schedulers: Sequence[SchedulerSnapshot]) -> SchedulerSnapshot:
    """Sums of what is counted; the first replica's where that has no sum."""
    if not schedulers:
        return SchedulerSnapshot()
    sums: dict[str, Any] = {}
    for field in msgspec.structs.fields(SchedulerSnapshot):
        values = [getattr(each, field.name) for each in schedulers]
        if all(isinstance(value, bool) for value in values):
            sums[field.name] = any(values)
        elif all(isinstance(value, int | float) for value in values):
            sums[field.name] = sum(values)
    return msgspec.structs.replace(schedulers[0], **sums)


def merged_metrics(texts: Sequence[bytes]) -> bytes:
    """Prometheus' text format of several engines, whose samples differ in the label `engine`: each family once."""
    found: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for text in texts:
        name, known = b"", False
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                known = name in found
                found.setdefault(name, ([], []))
            if line.startswith(b"#"):
                if not known:
                    found[name][0].append(line)
            else:
                found[name][1].append(line)
    return b"".join(line + b"\n" for heads, samples in found.values() for line in (*heads, *samples))


def merged_answer(action: str, answers: Sequence[bytes]) -> bytes:
    """One answer of an admin route, from those of all replicas; JSON."""
    if action not in SUMMED or len(answers) == 1:
        return answers[0]
    return msgspec.json.encode(_sum([msgspec.json.decode(answer) for answer in answers]))


def _sum(values: Sequence[Any]) -> Any:
    there = [value for value in values if value is not None]
    if not there:
        return None
    if isinstance(there[0], dict):
        return {name: _sum([value.get(name) for value in there]) for name in there[0]}
    return sum(there) if isinstance(there[0], int | float) else there[0]


def _of_each(value: Callable[[ReplicaSnapshot], float]) -> Callable[[Sequence[ReplicaSnapshot]], Mapping[str, float]]:
    return lambda replicas: {str(each.number): value(each) for each in replicas}


REPLICAS = (
    gauge("replica_up", "1 while the replica takes requests.", _of_each(lambda each: each.state == "ready"), "engine"),
    gauge("replica_requests", "Open requests at the replica.", _of_each(lambda each: each.requests), "engine"),
    gauge(
        "replica_work_tokens",
        "Prompt tokens that the replica's requests cost, as the router counts them.",
        _of_each(lambda each: each.work),
        "engine",
    ),
    gauge(
        "replica_known_blocks",
        "KV blocks that the router knows the replica to hold.",
        _of_each(lambda each: each.known_blocks),
        "engine",
    ),
    counter(
        "replica_restarts",
        "Times that the replica's process was started again.",
        _of_each(lambda each: each.restarts),
        "engine",
    ),
)
FAILOVERS = (
    counter(
        "failovers",
        "Requests that moved to another replica.",
        lambda counts: {reason: counts[reason] for reason in ("died", "drained")},
        "reason",
    ),
)
REJECTED = (
    counter(
        "fleet_rejected",
        "Requests refused before a replica heard of them.",
        lambda counts: {reason: counts[reason] for reason in ("overloaded", "rate_limit", "deadline", "invalid")},
        "reason",
    ),
)
_NONE: Final = EngineSnapshot(
    state="starting",
    uptime_seconds=0.0,
    model="",
    max_model_len=0,
    open_requests=0,
    scheduler=SchedulerSnapshot(),
    actors=(),
)
