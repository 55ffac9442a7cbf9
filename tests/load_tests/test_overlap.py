"""`bench overlap` and its device, which benchmarks share."""

import argparse
import json
from pathlib import Path

import pytest

from troupellm.load_tests import cli
from troupellm.load_tests.workers import timed as timed_worker
from troupellm.load_tests.workers.timed import TimedDevice


def bench(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.command(parser.add_subparsers())
    args = parser.parse_args(["bench", "overlap", *argv])
    return int(args.func(args))


def test_a_timed_device_computes_one_step_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(timed_worker.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timed_worker.time, "sleep", slept.append)
    device = TimedDevice(2.0)
    first, second = device.begin(), device.begin()
    assert device.free_at == 104.0
    now[0] = 103.0
    first()
    second()
    assert slept == [0.0, 1.0]
    now[0] = 110.0
    device.begin()
    assert device.free_at == 112.0  # it had nothing to do in between


@pytest.mark.parametrize("worker_host", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_steps_are_timed_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], worker_host: str) -> None:
    result = tmp_path / "result.json"
    argv = (
        "--seats",
        worker_host,
        "--running",
        "2",
        "--device-ms",
        "1",
        "--window-steps",
        "4",
        "--windows",
        "2",
        "--result-json",
        str(result),
    )
    assert bench(*argv) == 0
    found = json.loads(result.read_text())
    (row,) = found["rows"]
    assert (row["seat"], row["running"], row["device_ms"]) == (worker_host, 2, 1.0)
    assert round(row["step_ms"], 6) >= 1.0  # a difference of sums of floats
    (host,) = found["host"]
    assert 0.0 < host["collect_us"] < host["total_us"]
    assert f"{worker_host:<9}{2:>8}" in capsys.readouterr().out
