"""`bench sse` in small: it measures both apps and tells what it was asked for."""

import json

import pytest

from troupellm.server.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_both_apps_are_measured(tmp_path, capsys):
    file = tmp_path / "report.json"
    flags = ["--readers", "4", "--seconds", "0.5", "--warm-up-sec", "0.5", "--repeats", "1", "--stalled", "8"]
    assert main(["bench", "sse", *flags, "--result-json", str(file)]) in (0, 1)
    report = json.loads(file.read_text())
    for name in ("ours", "bare", "per_token_events"):
        assert report[name]["sends_per_second"] > 0
        assert report[name]["us_per_send"] > 0
    assert report["ours"]["tokens_per_second"] > 0
    assert report["bare"]["tokens_per_second"] == 0
    assert report["kept"]["per_token_events"]
    assert report["kept"]["stalled"]
    assert "CPU time per send" in capsys.readouterr().out
