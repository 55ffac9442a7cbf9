"""Snapshots, metrics and answers of several engines as one."""

from collections import Counter

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from troupellm.actors.metrics.families import counter, families, text_of
from troupellm.actors.replicas.merged import FAILOVERS, REPLICAS, merged_answer, merged_metrics, merged_snapshot
from troupellm.protocol.messages.snapshot import EngineSnapshot, ReplicaSnapshot, SchedulerSnapshot


def snapshot(**fields: object) -> EngineSnapshot:
    plain = {
        "state": "ready",
        "uptime_seconds": 1.0,
        "model": "m",
        "max_model_len": 9,
        "open_requests": 1,
        "actors": (),
    }
    return EngineSnapshot(**(plain | {"scheduler": SchedulerSnapshot()} | fields))  # type: ignore[arg-type]


def replica(number: int, **fields: object) -> ReplicaSnapshot:
    plain = {"pid": 5, "state": "ready", "reason": "", "restarts": 0, "requests": 2, "work": 30, "known_blocks": 4}
    return ReplicaSnapshot(number=number, **(plain | fields))  # type: ignore[arg-type]


def test_counts_are_summed_and_ages_are_the_newest() -> None:
    one = snapshot(scheduler=SchedulerSnapshot(waiting=1, running=2, steps=10), last_step_age_seconds=3.0)
    two = snapshot(
        scheduler=SchedulerSnapshot(waiting=4, running=1, steps=5, halted=True), last_step_age_seconds=1.0, paused=True
    )
    both = merged_snapshot([one, two], [replica(0), replica(1)], state="ready", open_requests=7)
    assert (both.scheduler.waiting, both.scheduler.running, both.scheduler.steps) == (5, 3, 15)
    assert both.scheduler.halted
    assert both.paused
    assert (both.last_step_age_seconds, both.open_requests, both.unready) == (1.0, 7, None)
    assert [each.number for each in both.replicas] == [0, 1]


def test_a_fleet_without_a_ready_replica_says_which_are_missing_and_why() -> None:
    gone = [
        replica(0, state="starting", reason="it ended by signal 9"),
        replica(1, state="failed", reason="x"),
    ]
    nothing = merged_snapshot([], gone, state="starting", open_requests=0)
    assert nothing.unready == "replica 0: it ended by signal 9; replica 1: x"


def test_a_fleet_is_unready_only_if_each_replica_is_and_hangs_only_if_each_does() -> None:
    restarting = "the model worker is restarting"
    told = [snapshot(unready=restarting, step_seconds=40.0), snapshot(step_seconds=0.2)]
    one = merged_snapshot(told, [replica(0, reason=restarting), replica(1)], state="ready", open_requests=0)
    assert (one.unready, one.step_seconds) == (None, 0.2)
    idle = merged_snapshot([told[0], snapshot()], [replica(0), replica(1)], state="ready", open_requests=0)
    assert idle.step_seconds is None
    both = [replica(number, reason=restarting) for number in range(2)]
    none = merged_snapshot(told[:1] * 2, both, state="ready", open_requests=0)
    assert none.unready == f"replica 0: {restarting}; replica 1: {restarting}"


def test_each_family_is_told_once_with_the_samples_of_all_engines() -> None:
    table = (counter("steps", "Steps.", lambda source: source), counter("more", "More.", lambda source: source + 1))
    texts = [text_of(families(table, float(number), {"engine": str(number)})) for number in range(2)]
    merged = merged_metrics(texts).decode()
    assert merged.count("# TYPE troupellm_steps_total counter") == 1
    found = {
        (sample.name, sample.labels["engine"]): sample.value
        for family in text_string_to_metric_families(merged)
        for sample in family.samples
    }
    assert found["troupellm_steps_total", "1"] == 1.0
    assert found["troupellm_more_total", "0"] == 1.0


def test_a_fleets_own_families_name_every_replica() -> None:
    text = text_of(families(REPLICAS, [replica(0), replica(1, state="starting", restarts=3)])).decode()
    assert 'troupellm_replica_up{engine="1"} 0.0' in text
    assert 'troupellm_replica_restarts_total{engine="1"} 3.0' in text

    text = text_of(families(FAILOVERS, Counter(died=2))).decode()
    assert 'troupellm_failovers_total{reason="died"} 2.0' in text
    assert 'troupellm_failovers_total{reason="drained"} 0.0' in text


def test_counts_in_answers_are_summed_and_states_are_not() -> None:
    assert msgspec.json.decode(merged_answer("abort", [b'{"aborted":2}', b'{"aborted":3}'])) == {"aborted": 5}
    report = [b'{"report":{"present":1,"missing":0}}', b'{"report":{"present":2,"missing":5}}']
    assert msgspec.json.decode(merged_answer("kv_prefetch", report)) == {"report": {"present": 3, "missing": 5}}
    assert merged_answer("kv_drop", [b'{"blocks":null}', b'{"blocks":4}']) == b'{"blocks":4}'
    assert merged_answer("sleep", [b'{"level":1}', b'{"level":1}']) == b'{"level":1}'
