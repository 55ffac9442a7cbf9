"""`bench start`: its report, and the start of a server with a tiny model."""

import argparse
import json
from pathlib import Path

import anyio
import pytest
from tiny_model import write_tiny_model

from troupellm.load_tests.start.command import Report, Start, run, start_once, text
from troupellm.load_tests.start.flags import add_flags


def start(bound: float, ready: float, first_token: float) -> Start:
    return Start(bound=bound, ready=ready, first_token=first_token)


def report(*first_tokens: float) -> Report:
    return Report(
        uncounted=start(1.0, 30.0, 31.0), starts=[start(0.5, seconds - 1, seconds) for seconds in first_tokens]
    )


def test_the_median_of_the_counted_starts_is_judged() -> None:
    assert report(5.0, 9.0, 20.0).kept
    assert not report(5.0, 10.5, 20.0).kept
    lines = text(report(5.0, 10.5, 20.0)).splitlines()
    assert lines[3].split() == ["first", "token", "10.50", "5.00", "20.00", "31.00"]
    assert lines[-1].endswith("MISSED")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_start_has_its_moments_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    result = tmp_path / "result.json"
    small = ["--rounds", "1", "--serve-arg=--kv-cache-memory-bytes=4MiB", "--serve-arg=--num-threads=1"]
    model = write_tiny_model(tmp_path / "tiny")
    assert run(parser.parse_args(["--model", str(model), *small, "--result-json", str(result)])) == 0
    written = json.loads(result.read_text())
    for each in [written["uncounted"], *written["starts"]]:
        assert 0 < each["bound"] < each["ready"] < each["first_token"]
    assert "1 starts" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="is no folder"):
        anyio.run(start_once, str(tmp_path / "no model"), [])
