"""`troupellm run-batch`: results in the order of the requests, gone on with after an end of any kind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import pytest
import tqdm

from troupellm.server.cli.main import main
from troupellm.tests.support.servers import processes

SMALL = (*processes.SMALL, *processes.ON_A_THREAD)
BODY = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def line(number: int, **body: Any) -> str:
    """The first ones take longest, so that others are ready before them."""
    given = BODY | {"prompt": f"line {number}", "max_tokens": 40 if number < 3 else 2} | body
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": given})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(entry) for entry in path.read_text().splitlines()]


def names(results: list[dict[str, Any]]) -> list[str | None]:
    return [result["custom_id"] for result in results]


def run(model: Path, *arguments: object) -> int:
    return main(["run-batch", "--model", str(model), *map(str, arguments), *SMALL])


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line(number) for number in range(30)) + "\n")
    return path


def test_results_stand_in_the_order_of_the_requests(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    given = [*(line(number) for number in range(10)), "{", line(11, top_p=7), line(0)]
    given += [json.dumps({"custom_id": "chat", "url": "/v1/chat/completions", "body": chat}), "", "   "]
    given += [json.dumps({"custom_id": "far", "url": "/server_info", "body": {}})]
    (tmp_path / "in.jsonl").write_text("\n".join(given))
    out = tmp_path / "out.jsonl"
    assert run(checkpoint, "-i", tmp_path / "in.jsonl", "-o", out, "--max-inflight", 4) == 0
    results = read(out)
    assert names(results) == [*(f"c{number}" for number in range(10)), None, "c11", "c0", "chat", "far"]
    statuses = [result["response"] and result["response"]["status_code"] for result in results]
    assert statuses == [200] * 10 + [None, 400, None, 200, None]
    codes = [result["error"] and result["error"]["code"] for result in results]
    assert codes[10:] == ["invalid_json_line", None, "duplicate_custom_id", None, "invalid_url"]
    tokens = results[1]["response"]["body"]["choices"][0]["token_ids"]
    assert len(tokens) == 40
    assert "done: 11 answered, 4 failed" in capsys.readouterr().err


def test_an_output_file_is_gone_on_with(checkpoint: Path, requests: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.jsonl"
    assert run(checkpoint, "-i", requests, "-o", out) == 0
    whole = out.read_bytes()
    first = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(first[:12]) + first[12][:20])  # as a power cut leaves it
    assert run(checkpoint, "-i", requests, "-o", out) == 0
    assert "30 answered, 0 failed, 12 of them before" in capsys.readouterr().err
    again = read(out)
    assert out.read_bytes().startswith(b"".join(first[:12]))
    assert names(again) == [f"c{number}" for number in range(30)]
    texts = [[entry["response"]["body"]["choices"][0]["text"] for entry in part] for part in (again, read(out))]
    assert texts[0] == texts[1]
    assert run(checkpoint, "-i", requests, "-o", out) == 0  # nothing is left to do
    assert read(out) == again


class Bar:
    """Records the calls of a progress bar."""

    def __init__(self, *, total: int | None, initial: int, **more: object) -> None:
        self.total, self.begun, self.done, self.failed = total, initial, initial, -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """It is not drawn."""

    def update(self) -> None:
        self.done += 1

    def set_postfix(self, *, failed: int, refresh: bool) -> None:
        self.failed = failed


def test_a_bar_shows_how_many_requests_are_answered_and_from_where_a_run_goes_on(
    checkpoint: Path, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[Bar] = []

    def made(**given: Any) -> Bar:
        bars.append(Bar(**given))
        return bars[-1]

    monkeypatch.setattr(tqdm, "tqdm", made)
    requests.write_text(requests.read_text() + line(30, top_p=7) + "\n")
    out = tmp_path / "out.jsonl"
    assert run(checkpoint, "-i", requests, "-o", out) == 0
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:10]))
    assert run(checkpoint, "-i", requests, "-o", out) == 0
    assert [(bar.total, bar.begun, bar.done, bar.failed) for bar in bars] == [(31, 0, 31, 1), (31, 10, 31, 1)]


def test_an_output_file_of_other_results_is_refused(
    checkpoint: Path, requests: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out.jsonl"
    for content, says in (
        ("a diary\n", "no result"),
        (json.dumps({"id": "x", "custom_id": "other"}) + "\n", "not that of request 1"),
        (
            "".join(json.dumps({"id": "x", "custom_id": f"c{number}"}) + "\n" for number in range(31)),
            "only 30 requests",
        ),
    ):
        out.write_text(content)
        assert run(checkpoint, "-i", requests, "-o", out) == 1
        assert says in capsys.readouterr().err
        assert out.read_text() == content
    assert run(checkpoint, "-i", requests, "-o", out, "--overwrite") == 0
    assert len(read(out)) == 30
    assert run(checkpoint, "-i", tmp_path / "nowhere", "-o", out) == 1
    assert run(checkpoint, "-i", requests, "-o", out, "--max-inflight", "none") == 2


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_the_input_file_is_never_written_to(requests: Path, tmp_path: Path, capsys: Any, more: tuple[str, ...]) -> None:
    """The file is recognized under every name."""
    content = requests.read_bytes()
    (tmp_path / "link").symlink_to(requests)
    (tmp_path / "same").hardlink_to(requests)
    for out in (requests, tmp_path / "link", tmp_path / "same"):
        assert run(tmp_path, "-i", requests, "-o", out, *more) == 2
        assert "input file" in capsys.readouterr().err
        assert requests.read_bytes() == content


def command(model: Path, *arguments: object) -> list[str]:
    module = [sys.executable, "-m", "troupellm.server.cli.main", "run-batch", "--model", str(model)]
    return [*module, *map(str, arguments), *SMALL]


@pytest.mark.slow
def test_standard_input_and_output(checkpoint: Path, requests: Path) -> None:
    done = subprocess.run(
        command(checkpoint, "-i", "-", "-o", "-"), input=requests.read_bytes(), capture_output=True, check=True
    )
    assert names([json.loads(entry) for entry in done.stdout.splitlines()]) == [f"c{number}" for number in range(30)]
    assert b"30 answered, 0 failed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_is_gone_on_with(checkpoint: Path, tmp_path: Path, number: int) -> None:
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("\n".join(line(number, max_tokens=60) for number in range(400)))
    with subprocess.Popen(command(checkpoint, "-i", requests, "-o", out, "--max-inflight", 2)) as process:
        deadline = time.monotonic() + 60
        while not (out.exists() and out.read_bytes().count(b"\n") > 5):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait(20) == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    before = out.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert 5 < kept.count(b"\n") < 400
    assert subprocess.run(command(checkpoint, "-i", requests, "-o", out), check=False).returncode == 0
    assert out.read_bytes().startswith(kept)
    assert names(read(out)) == [f"c{number}" for number in range(400)]
