"""The statistics line and the event loop's lateness."""

import logging

import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.messages.snapshot import EngineSnapshot, OffloadSnapshot, SchedulerSnapshot, TierSnapshot
from troupellm.server.http.listener import bind
from troupellm.server.observe import vitals
from troupellm.server.observe.vitals import WINDOW_SECONDS, LoopLag, StatsLine, Vitals
from troupellm.server.serve.http_side import LocalSide


def snapshot(prompt: int = 0, **scheduler: int) -> EngineSnapshot:
    return EngineSnapshot(
        state="ready",
        uptime_seconds=1.0,
        model="m",
        max_model_len=64,
        open_requests=0,
        actors=(),
        scheduler=SchedulerSnapshot(**scheduler),
        prompt_tokens_computed=prompt,
    )


def test_rates_since_the_last_line_and_silence_without_work(monkeypatch):
    monkeypatch.setattr(vitals.time, "monotonic", lambda: 100.0)
    stats = StatsLine(snapshot())
    assert stats.line(snapshot(), 110.0) is None
    busy = snapshot(
        500,
        tokens_generated=1234,
        running=3,
        waiting=2,
        blocks_total=10,
        blocks_free=5,
        prefix_queries=8,
        prefix_hits=2,
    )
    text, fields = stats.line(busy, 120.0) or ("", {})
    assert text == (
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 123.4 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, KV cache usage: 50.0%, Prefix cache hit rate: 25.0%"
    )
    assert fields["generation_tokens_per_second"] == 123.4
    done = snapshot(500, tokens_generated=1234, prefix_queries=8, prefix_hits=2)
    last = stats.line(done, 130.0)
    assert last is not None
    assert "Running: 0 reqs" in last[0]
    assert stats.line(done, 140.0) is None


def test_the_line_says_what_came_of_drafts(monkeypatch):
    monkeypatch.setattr(vitals.time, "monotonic", lambda: 100.0)
    stats = StatsLine(snapshot(drafts=10, draft_tokens=40, accepted_draft_tokens=10))
    told = stats.line(snapshot(running=1, drafts=30, draft_tokens=100, accepted_draft_tokens=40), 110.0)
    assert told is not None
    assert told[0].endswith(", Mean acceptance length: 2.50, Draft acceptance rate: 50.0% of 6.0 drafts/s")
    assert (told[1]["acceptance_length"], told[1]["draft_acceptance_rate"]) == (2.5, 0.5)
    assert told[1]["draft_tokens_per_second"] == 6.0


def test_the_worst_lateness_is_kept_for_a_window(caplog, monkeypatch):
    monkeypatch.setattr(vitals.time, "monotonic", lambda: 0.0)
    lag = LoopLag(alarm=1.0)
    with caplog.at_level(logging.WARNING, logger="troupellm.server"):
        lag.note(0.2, 1.0)
        lag.note(1.5, 2.0)
        lag.note(1.6, 3.0)
        assert lag.worst == 1.6
        lag.note(0.1, WINDOW_SECONDS + 1)
        assert lag.worst == 1.6
        lag.note(0.3, 2 * WINDOW_SECONDS + 2)
        assert lag.worst == 0.3
    assert len(caplog.records) == 1
    assert "held up for 1.5 seconds" in caplog.text


@pytest.mark.parametrize("alarm", [0.0, 10.0])
def test_a_small_lateness_or_none_to_tell_is_silent(caplog, alarm):
    LoopLag(alarm).note(5.0, 1.0)
    assert not caplog.records


@pytest.mark.anyio
async def test_the_process_shows_its_lateness_to_prometheus():
    measured = Vitals(0.0)
    measured.lag.note(0.25, 1.0)
    assert 'troupellm_loop_lag_seconds{process="server"} 0.25' in measured.text().decode()


@pytest.mark.anyio
async def test_a_server_of_its_own_tells_of_its_connections() -> None:
    config = ServerConfig(port=0)
    listener, _ = bind(config)
    with listener:
        measured = LocalSide(config, listener).host.vitals
        assert measured is not None
        assert 'troupellm_http_connections{process="server"} 0.0' in measured.text().decode()
        assert "troupellm_http_connections{" not in Vitals(0.0).text().decode()


def test_the_line_says_what_tiers_gave(monkeypatch):
    monkeypatch.setattr(vitals.time, "monotonic", lambda: 100.0)
    tiers = TierSnapshot(name="host"), TierSnapshot(name="disk", disabled="full")
    stats = StatsLine(snapshot(offload=OffloadSnapshot(queried_tokens=100, hit_tokens=90, tiers=tiers)))
    told = stats.line(
        snapshot(running=1, offload=OffloadSnapshot(queried_tokens=300, hit_tokens=140, tiers=tiers)), 110.0
    )
    assert told is not None
    assert told[0].endswith(", External prefix cache hit rate: 25.0%, KV tiers left alone: disk")
    assert told[1]["external_prefix_cache_hit_rate"] == 0.25
