"""The soak itself, short and long, and its arithmetic."""

import argparse
import asyncio
import os
from types import SimpleNamespace

import msgspec
import pytest

from troupellm.load_tests.bench.soak import KILLING_SHARE, Report, _drive, around, slope
from troupellm.load_tests.traffic import held as server
from troupellm.load_tests.traffic.held import Held
from troupellm.server.cli.main import main
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

MINUTES = float(os.environ.get("TROUPE_SOAK_MINUTES", "20"))
KILL_SECONDS = min(20.0, 9.0 * MINUTES)
HAPPENS = ("stream: ok", "left while streaming", "left at once", "stalled, then left", "refused as it must be")
"""At least once in a long soak."""
HELD = Held(descriptors=20, tasks=10, threads=6, blocks=0, requests=0, messages=0)
SHORT_SECONDS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("soak") / "tiny")


def report(**fields) -> Report:
    values = {
        "minutes": 1.0, "slope_mebibytes_per_minute": 0.1, "mebibytes": (1.0, 1.0), "before": HELD, "after": HELD,
        "worker_kills": 0, "own_mebibytes": (0.0, 0.0), "exit_code": 0, "ends": {"stream: ok": 3}, "samples": [],
    }  # fmt: skip
    return Report(**{**values, **fields})


def soak(checkpoint, folder, minutes: float, max_slope: float, *more: str) -> Report:
    result = folder / "soak.json"
    flags = ["--minutes", str(minutes), "--max-slope", str(max_slope), "--result-json", str(result)]
    flags += ["--concurrency", "8", "--serve-arg=--kv-cache-memory-bytes=4MiB", "--serve-arg=--num-threads=1"]
    code = main(["bench", "soak", "--model", str(checkpoint), *flags, *more])
    found = msgspec.json.decode(result.read_bytes(), type=Report)
    assert (code, found.failures(max_slope)) == (0, [])
    return found


def test_a_slope_is_not_moved_by_jumps():
    steady = [(minute / 10, 100 + 0.5 * minute / 10) for minute in range(200)]
    assert slope(steady) == pytest.approx(0.5)
    jumped = [(minute, size + (300 if 50 <= number < 60 else 0)) for number, (minute, size) in enumerate(steady)]
    assert slope(jumped) == pytest.approx(0.5, abs=0.1)
    assert slope([]) == slope([(0.0, 1.0)]) == 0.0


def test_the_server_is_compared_with_itself_around_the_kills():
    samples = [(minute, 100.0 + minute) for minute in range(20)]
    assert around([3, 5], samples, 6.0) == (101.5, 107.5)
    assert around([], samples, 6.0) == around([3, 5], samples, 60.0) == (0.0, 0.0)


def test_a_soak_fails_on_growth_leaks_and_errors():
    assert report().failures(1.0) == []
    assert report(slope_mebibytes_per_minute=1.5).failures(1.0) == ["memory grows by 1.50 MiB/min"]
    assert report(worker_kills=10, own_mebibytes=(100.0, 109.0)).failures(1.0) == []
    leaking = report(worker_kills=10, own_mebibytes=(100.0, 131.0))
    assert leaking.failures(1.0) == ["the server's own process has grown by 31.0 MiB over 10 worker kills"]
    assert report(exit_code=1).failures(1.0) == ["the server ended with exit code 1"]
    leaky = msgspec.structs.replace(HELD, descriptors=40, blocks=1, tasks=12)
    assert report(after=leaky).failures(1.0) == ["20 leaked: descriptors", "1 leaked: blocks"]
    odd = {"stream: ok": 3, "unexpected: stream silently short": 2}
    assert report(ends=odd).failures(1.0) == ["2 x unexpected: stream silently short"]


def test_a_soak_whose_server_ends_shows_the_end_of_its_log():
    ended = SimpleNamespace(url="http://127.0.0.1:1", model="tiny", running=False, log=["first", "out of memory"])
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(_drive(ended, argparse.Namespace(concurrency=2, kill_every=0.0), 0, 60.0))


@pytest.mark.slow
def test_a_few_seconds_of_soak(checkpoint, tmp_path, capsys, monkeypatch):
    """Nothing is leaked; memory still finds its level and is not judged."""
    monkeypatch.setattr(server, "SETTLED_SECONDS", 1.0)
    found = soak(checkpoint, tmp_path, SHORT_SECONDS / 60, 100_000.0, "--serve-arg=--no-spare-worker")
    assert sum(found.ends.values()) > 8
    assert "passed: nothing leaked" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
def test_a_soak_with_killed_workers_keeps_its_memory(checkpoint, tmp_path):
    found = soak(checkpoint, tmp_path, MINUTES, 1.0, "--kill-every", str(KILL_SECONDS))
    assert 2 * found.worker_kills * KILL_SECONDS >= 60 * MINUTES * KILLING_SHARE
    assert min(found.own_mebibytes) > 0.0
    assert {name for name in HAPPENS if not found.ends.get(name)} == set()
