"""`bench sse` in small: it measures both apps and tells what it was asked for."""

import json

import pytest

from troupellm.server.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_both_apps_are_measured(tmp_path, capsys):
    file = tmp_path / "report.json"
    flags = ["--readers", "4", "--seconds", "0.5", "--warm-up-sec", "0.5", "--repeats", "1", "--stalled", "0"]
    assert main(["bench", "sse", *flags, "--result-json", str(file)]) in (0, 1)
    report = json.loads(file.read_text())
    for name in ("ours", "bare", "per_token_events"):
        assert report[name]["sends_per_second"] > 0
        assert report[name]["us_per_send"] > 0
    assert report["ours"]["tokens_per_second"] > 0
    assert report["bare"]["tokens_per_second"] == 0
    assert report["kept"]["per_token_events"]
    assert "stalled" not in report
    assert "CPU time per send" in capsys.readouterr().out


def test_memory_with_readers_that_never_read_is_measured_alone(tmp_path, capsys):
    file = tmp_path / "report.json"
    flags = ["--seconds", "0.5", "--repeats", "0", "--stalled", "4", "--step-ms", "1", "--flush-ms", "0"]
    assert main(["bench", "sse", *flags, "--result-json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert set(report) == {"kept", "stalled"}
    assert report["kept"] == {"stalled": True}
    assert report["stalled"]["readers"] == report["stalled"]["paused"] == 4
    assert report["stalled"]["tokens_meanwhile"] == 0
    told = capsys.readouterr().out
    assert "4 readers that never read: 4 paused" in told
    assert "CPU time per send" not in told
