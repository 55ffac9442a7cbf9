"""Metrics: what is counted, under which names, and that a snapshot is read at the scrape."""

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from troupellm.actors.metrics import tables
from troupellm.actors.metrics.actor import Histogram, MetricsSink, MetricsStore, length_bounds
from troupellm.actors.metrics.exposition import Exposition
from troupellm.actors.metrics.families import families
from troupellm.actors.metrics.tables import ENGINE, STORE
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.protocol.messages.graph_report import GraphReport
from troupellm.protocol.messages.metrics import DraftStats, RequestCancelled, RequestRejected, RequestStats, StepStats
from troupellm.protocol.messages.snapshot import (
    ActorSnapshot,
    EncodersSnapshot,
    EngineSnapshot,
    KVEventsSnapshot,
    MailboxSnapshot,
    MediaSnapshot,
    ProposerSnapshot,
    SchedulerSnapshot,
)
from troupellm.protocol.messages.worker import StepTimings

LABELS = {"model_name": "m", "engine": "0"}


def step(**fields: Any) -> StepStats:
    values = {
        "num_rows": 3, "prefill_tokens": 10, "decode_tokens": 2, "seconds": 0.03, "new_tokens": 3, "preemptions": 1,
        "timings": StepTimings(prepare=0.001, forward=0.02, sample=0.004), "prefix_queries": 10, "prefix_hits": 4,
        "inter_token_seconds": ((0.03, 2), (0.2, 1)),
    }  # fmt: skip
    return StepStats(**{**values, **fields})


def request(**fields: Any) -> RequestStats:
    values = {
        "reason": "stop", "n": 1, "max_tokens": 16, "prompt_tokens": 10, "completion_tokens": 5, "queue_seconds": 0.1,
        "prefill_seconds": 0.2, "decode_seconds": 0.4, "first_token_seconds": 0.3, "total_seconds": 0.7,
    }  # fmt: skip
    return RequestStats(**{**values, **fields})


def exposed(store: MetricsStore, snapshot: EngineSnapshot, *, compat: bool = True) -> dict[str, dict[Any, float]]:
    text = Exposition(store, lambda: snapshot, {"block_size": "16"}).text(compat=compat).decode()
    samples: dict[str, dict[Any, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items()
            rest = tuple(sorted(value for name, value in sample.labels.items() if name not in LABELS))
            samples.setdefault(sample.name, {})[rest] = sample.value
    return samples


@pytest.fixture
def snapshot() -> EngineSnapshot:
    return EngineSnapshot(
        state="ready",
        uptime_seconds=5.0,
        model="m",
        max_model_len=64,
        open_requests=3,
        scheduler=SchedulerSnapshot(waiting=1, running=2, blocks_total=10, blocks_free=3, blocks_cached=2),
        actors=(ActorSnapshot("worker", 0, (MailboxSnapshot("worker", 1, 2, 9),)),),
    )


def test_steps_and_requests_are_counted(snapshot: EngineSnapshot) -> None:
    store = MetricsStore(64)
    for message in (
        step(),
        step(),
        request(),
        request(reason="abort", queue_seconds=None),
        RequestRejected("full"),
        RequestCancelled("stall"),
    ):
        store.on_message(message)
    samples = exposed(store, snapshot)
    assert samples["troupellm_generation_tokens_total"][()] == 6
    assert samples["troupellm_cancelled_total"] == {("client",): 0, ("stall",): 1, ("shutdown",): 0, ("admin",): 0}
    assert samples["troupellm_prompt_tokens_total"][()] == 20
    assert samples["troupellm_requests_finished_total"] == {("stop",): 1, ("length",): 0, ("abort",): 1, ("error",): 0}
    assert samples["troupellm_rejected_total"] == {("full",): 1}
    assert samples["troupellm_inter_token_latency_seconds_count"][()] == 6
    assert samples["troupellm_inter_token_latency_seconds_sum"][()] == pytest.approx(0.52)
    assert samples["troupellm_request_queue_time_seconds_count"][()] == 1
    assert samples["troupellm_request_time_per_output_token_seconds_sum"][()] == pytest.approx(0.2)
    assert samples["troupellm_step_seconds_sum"][("forward",)] == pytest.approx(0.04)


def test_gauges_come_from_the_snapshot(snapshot: EngineSnapshot) -> None:
    samples = exposed(MetricsStore(64), snapshot)
    assert samples["troupellm_requests_running"][()] == 2
    assert samples["troupellm_kv_cache_usage_ratio"][()] == 0.5
    assert samples["troupellm_kv_blocks"] == {("free",): 3, ("used",): 5, ("cached",): 2}
    assert samples["troupellm_actor_mailbox_depth"] == {("worker",): 1}
    assert samples["troupellm_actor_mailbox_capacity"] == {("worker",): 2}
    assert samples["troupellm_actor_mailbox_messages_total"] == {("worker",): 9}
    assert samples["troupellm_actor_restarts_total"] == {("worker",): 0}


def test_images_have_families_where_the_model_sees_them(snapshot: EngineSnapshot) -> None:
    assert not [name for name in exposed(MetricsStore(64), snapshot) if name.startswith("troupellm_media_")]
    encoders = EncodersSnapshot(encoded=3, hits=2, evicted=1, kept_vectors=9)
    scheduler = msgspec.structs.replace(snapshot.scheduler, encoders=encoders)
    seeing = msgspec.structs.replace(snapshot, media=MediaSnapshot(refused=4), scheduler=scheduler)
    samples = exposed(MetricsStore(64), seeing)
    assert samples["troupellm_media_refused_total"][()] == 4
    assert samples["troupellm_encoder_images_total"][()] == 3


def is_of(family: str, sample: str) -> bool:
    return sample.removeprefix(family) in ("", "_total", "_bucket", "_count", "_sum", "_info")


def test_the_names_of_vllm_are_repeated_when_asked(snapshot: EngineSnapshot) -> None:
    store = MetricsStore(64)
    store.on_message(step(drafts=DraftStats(rows=1, drafted=1, accepted=1, accepted_at=(1,))))
    store.on_message(request())
    samples = exposed(store, snapshot)
    assert samples["vllm:num_requests_waiting"] == samples["troupellm_requests_waiting"]
    assert samples["vllm:generation_tokens_total"][()] == 3
    assert samples["vllm:request_success_total"][("stop",)] == 1
    assert samples["vllm:time_to_first_token_seconds_bucket"][("0.5",)] == 1
    assert samples["vllm:iteration_tokens_total_count"][()] == 1
    assert samples["vllm:cache_config_info"] == {("16",): 1.0}
    families = {name.split("_bucket")[0] for name in samples if name.startswith("vllm:")}
    named = [row for row in (*STORE, *ENGINE) if row.vllm]
    assert len([name for name in families if not name.endswith(("_count", "_sum"))]) == len(named) + 1  # cache_config
    assert not [name for name in exposed(store, snapshot, compat=False) if name.startswith("vllm:")]


def test_drafts_are_counted_by_position_under_both_names(snapshot: EngineSnapshot) -> None:
    store = MetricsStore(64)
    assert exposed(store, snapshot)["vllm:spec_decode_num_drafts_total"][()] == 0
    for drafts in (
        DraftStats(rows=3, drafted=12, accepted=5, accepted_at=(2, 2, 1)),
        DraftStats(rows=2, drafted=2, accepted=1, accepted_at=(1,)),
    ):
        store.on_message(step(drafts=drafts))
    samples = exposed(store, snapshot)
    by_position = {("0",): 3, ("1",): 2, ("2",): 1}
    for name, count in (("num_drafts", 5), ("num_draft_tokens", 14), ("num_accepted_tokens", 6)):
        assert samples[f"vllm:spec_decode_{name}_total"][()] == count
        assert samples[f"troupellm_spec_decode_{name.removeprefix('num_')}_total"][()] == count
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == by_position
    assert samples["troupellm_spec_decode_accepted_tokens_per_pos_total"] == by_position


def test_graphs_are_shown_where_there_are_any(snapshot: EngineSnapshot) -> None:
    def shown(graphs: GraphReport | None) -> dict[str, float]:
        scheduler = msgspec.structs.replace(snapshot.scheduler, graphs=graphs)
        samples = exposed(MetricsStore(64), msgspec.structs.replace(snapshot, scheduler=scheduler))
        return {name: values[()] for name, values in samples.items() if name.startswith("troupellm_cuda_graph")}

    assert shown(None) == {}
    assert shown(GraphReport(captured=3, missing=2, given_up=1, seconds=0.5, bytes=70)) == {
        "troupellm_cuda_graphs": 3,
        "troupellm_cuda_graphs_missing": 2,
        "troupellm_cuda_graphs_given_up": 1,
        "troupellm_cuda_graph_bytes": 70,
        "troupellm_cuda_graph_capture_seconds": 0.5,
    }


def test_metrics_of_a_proposer_are_shown_where_it_has_them(snapshot: EngineSnapshot) -> None:
    def shown(proposer: ProposerSnapshot | None) -> dict[str, float]:
        scheduler = msgspec.structs.replace(snapshot.scheduler, proposer=proposer)
        samples = exposed(MetricsStore(64), msgspec.structs.replace(snapshot, scheduler=scheduler))
        return {
            name.removeprefix("troupellm_spec_decode_"): values[()]
            for name, values in samples.items()
            if name.startswith(("troupellm_spec_decode_past", "troupellm_spec_decode_proposer"))
        }

    assert shown(None) == {}
    assert shown(ProposerSnapshot(failures=2)) == {"proposer_failures_total": 2}
    kept = ProposerSnapshot(
        past_outputs=3, past_tokens=70, past_tokens_capacity=128, past_evictions=5, memory_bytes=9000
    )
    assert shown(kept) == {
        "proposer_failures_total": 0,
        "past_evictions_total": 5,
        "past_outputs": 3,
        "past_tokens": 70,
        "past_tokens_capacity": 128,
        "past_bytes": 9000,
    }


def test_a_histogram_counts_values_within_its_bounds() -> None:
    assert length_bounds(64) == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0, 2)
    histogram.observe(1.5)
    histogram.observe(9.0)
    histogram.observe(None)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 12.5)


@pytest.mark.anyio
async def test_the_sink_drains_and_ends_with_its_inbox() -> None:
    inbox: Mailbox[Any, Any] = Mailbox("metrics", 2)
    store = MetricsStore(64)
    assert [inbox.offer(step()) for _ in range(3)] == [True, True, False]
    inbox.close()
    await MetricsSink(inbox, store).run()
    assert store.generation_tokens == 6
    assert inbox.snapshot().dropped == 1


def test_kv_events_are_counted() -> None:
    events = KVEventsSnapshot(reported=12, kept=5, lost=4, waiting_readers=3, findable=9)
    found = {family.name: family.samples[0].value for family in families(tables.KV_EVENTS, events)}
    assert sorted(found.values()) == [3, 4, 5, 9, 12]
