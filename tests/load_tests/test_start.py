"""`bench start`: its report, the start of a server with a tiny model, and what `--help` loads."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from troupellm.load_tests.bench.start import HELPS, Help, Report, Start, help_once, run, start_once, text
from troupellm.load_tests.flags.servers import start as add_flags
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model


def start(bound: float, ready: float, first_token: float) -> Start:
    return Start(bound=bound, ready=ready, first_token=first_token)


def report(*first_tokens: float, helps: tuple[float, ...] = (0.2,)) -> Report:
    return Report(
        uncounted=start(1.0, 30.0, 31.0),
        starts=[start(0.5, seconds - 1, seconds) for seconds in first_tokens],
        helps=[Help(command=f"help {number}", uncounted=0.9, counted=[0.1, each]) for number, each in enumerate(helps)],
    )


def test_the_median_of_the_counted_starts_is_judged() -> None:
    assert report(5.0, 9.0, 20.0).kept
    assert not report(5.0, 10.5, 20.0).kept
    lines = text(report(5.0, 10.5, 20.0)).splitlines()
    assert lines[3].split() == ["first", "token", "10.50", "5.00", "20.00", "31.00"]
    assert lines[4].split() == ["end", "of", "help", "0", "0.15", "0.10", "0.20", "0.90"]
    assert lines[-2].endswith("MISSED")
    assert lines[-1].endswith("kept")


def test_every_help_has_to_be_quick() -> None:
    assert report(5.0, helps=(0.2, 0.8)).helps_kept
    assert not report(5.0, helps=(0.2, 1.0)).helps_kept
    assert text(report(5.0, helps=(0.2, 1.0))).endswith("MISSED")


@pytest.mark.parametrize("words", HELPS.values(), ids=HELPS)
def test_a_help_is_shown_without_torch(words: list[str]) -> None:
    """Runs each help and lists the loaded modules, so imports inside of functions count."""
    code = (
        "import sys\n"
        "from troupellm.server.cli.main import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'hypercorn', 'httpx', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: troupellm")
    assert help_once(words) > 0


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
    out = capsys.readouterr().out
    assert "1 starts" in out
    assert [each["command"] for each in written["helps"]] == list(HELPS)
    assert "end of troupellm serve --help" in out


@pytest.mark.slow
def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="is no folder"):
        anyio.run(start_once, str(tmp_path / "no model"), [])
