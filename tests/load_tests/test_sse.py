"""`bench sse` in small: it measures both apps and tells what it was asked for."""

import argparse
import asyncio
import json
import tempfile

import pytest

from troupellm.load_tests.bench import sse as command
from troupellm.server.cli.main import main
from troupellm.tests.support.environment.without_package import run_without


def test_without_psutil_it_says_what_installs_it(tmp_path):
    program = "import sys; from troupellm.server.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = run_without("psutil", program, "bench", "sse", folder=tmp_path)
    assert (done.returncode, done.stderr) == (2, "bench sse: psutil comes with the test tools (make test)\n")


class Process:
    """Answers with its address, and ends when it is killed."""

    def __init__(self):
        self.returncode = self.stdin = None
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(b'{"url": "http://127.0.0.1:17"}\n')

    def kill(self):
        self.returncode = -9

    async def wait(self):
        return self.returncode


def test_the_model_of_a_server_that_is_killed_does_not_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written = []

    async def start(*words, **_):
        (folder,) = tmp_path.iterdir()
        assert str(folder) == words[words.index("--model-folder") + 1]
        (folder / "model.safetensors").touch()
        written.append(folder)
        return Process()

    async def main():
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        args = argparse.Namespace(step_ms=1.0, flush_ms=0.0, fronts=0)
        async with command.subject(args, 1) as found:
            assert found.port == 17

    asyncio.run(main())
    assert len(written) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_both_apps_are_measured(tmp_path, capsys):
    file = tmp_path / "report.json"
    flags = ["--readers", "4", "--seconds", "0.5", "--warm-up-sec", "0.5", "--repeats", "1", "--stalled", "0"]
    assert main(["bench", "sse", *flags, "--result-json", str(file)]) in (0, 1)
    report = json.loads(file.read_text())
    for name in ("ours", "bare", "per_token_events"):
        assert report[name]["sends_per_second"] > 0
        assert report[name]["us_per_send"] > 0
        assert 0 < report[name]["readers"] <= 4
    assert report["ours"]["tokens_per_second"] > 0
    assert report["bare"]["tokens_per_second"] == 0
    assert report["kept"]["per_token_events"]
    assert "stalled" not in report
    assert "CPU time per send" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(120)
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
