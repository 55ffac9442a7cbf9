import logging
from types import SimpleNamespace
from typing import Any

import pytest

from troupellm.protocol.config.engine import EngineConfig, SchedulerConfig, ServerConfig, WorkerConfig
from troupellm.protocol.messages.snapshot import EngineSnapshot, SchedulerSnapshot
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.server.host.server_state import ServerState


def test_details_of_loading_are_logged_line_by_line(caplog):
    caplog.set_level(logging.INFO, logger="troupellm.server")
    host = ServerState(ServerConfig())
    host.report(LoadProgress(phase="weights", done=1, total=4))
    assert caplog.records == []
    host.report(LoadProgress(phase="ready", done=4, total=4, detail="weights  1 GiB\nKV cache 2 GiB"))
    assert [record.getMessage() for record in caplog.records] == ["weights  1 GiB", "KV cache 2 GiB"]
    assert host.progress.phase == "ready"


def reasons(step_timeout: float, **snapshot: Any) -> list[str]:
    """Why a host with this engine is not ready; all of its readers are paused where nothing else is said."""
    told = EngineSnapshot(
        state="ready",
        uptime_seconds=9000.0,
        model="m",
        max_model_len=64,
        open_requests=0,
        actors=(),
        **{"scheduler": SchedulerSnapshot(running=3, paused=5), "last_step_age_seconds": 7200.0} | snapshot,
    )
    worker, scheduler = WorkerConfig(step_timeout=step_timeout), SchedulerConfig(max_num_queued_reqs=4)
    config = EngineConfig(worker=worker, scheduler=scheduler)
    engine: Any = SimpleNamespace(state="ready", config=config, snapshot=lambda: told)
    return ServerState(ServerConfig(), engine).readiness()


@pytest.mark.parametrize(
    ("step_timeout", "step_seconds", "ready"),
    [
        (2.0, 2.1, False),
        (2.0, 1.9, True),
        (2.0, None, True),  # idle for hours, or between two steps
        (0.0, 0.5, True),  # a step may take any time
        (0.0, 9000.0, True),
    ],
)
def test_a_step_that_is_overdue_is_no_time_to_send_requests(step_timeout, step_seconds, ready):
    told = reasons(step_timeout, step_seconds=step_seconds)
    assert told == ([] if ready else ["no step has finished for 2 seconds"])


def test_every_reason_not_to_be_ready_is_told():
    told = reasons(1.0, step_seconds=3.0, unready="the worker restarts", scheduler=SchedulerSnapshot(waiting=4))
    assert told == [
        "engine_restarting: the worker restarts",
        "no step has finished for 3 seconds",
        "the waiting queue is full",
    ]
