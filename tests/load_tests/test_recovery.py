"""`bench recovery`: when streams count as having gone on, what it judges, and kills under a few streams."""

import argparse
import asyncio
import json
import math
from pathlib import Path

import pytest

from troupellm.load_tests.bench.recovery import Side, check_flags, run, table
from troupellm.load_tests.client.records import RequestRecord
from troupellm.load_tests.flags.servers import recovery as add_flags
from troupellm.load_tests.traffic.own_server import OwnServer
from troupellm.load_tests.traffic.streams import Kill, kill_under, seen, went_on
from troupellm.protocol.errors import ConfigError
from troupellm.server.cli.flags import ENV_PREFIX
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

KILLED = 10.0


def record(index: int, times: list[float], *, tokens: tuple[int, ...] = (1, 2, 3), error: str = "") -> RequestRecord:
    return RequestRecord(
        index=index, wanted_tokens=3, chunk_times=times, token_ids=list(tokens), ended=times[-1], error=error
    )


def test_tokens_under_way_at_the_kill_are_not_new_ones() -> None:
    streams = [[9.0, 10.02, 11.5, 11.6], [9.1, 10.05, 11.7], [9.2, 11.9]]
    assert went_on(streams, KILLED) == (11.5, 11.9)


def test_streams_that_never_go_on_take_for_ever() -> None:
    assert went_on([[9.0], [9.5]], KILLED) == (math.inf, math.inf)
    assert went_on([[9.0, 11.0], [9.5, 10.1]], KILLED) == (11.0, math.inf)


def test_a_kill_is_judged_by_the_tokens_of_every_stream() -> None:
    records = [
        record(0, [9.0, 11.0]),
        record(1, [9.0, 12.0], tokens=(1, 9, 3)),
        record(2, [9.0, 12.0], error="error event: the worker died"),
        record(3, [9.0, 9.5]),
        record(4, [9.0, 12.5], tokens=(1, 2)),
    ]
    kill = seen(records, [[1, 2, 3]] * 5, KILLED)
    assert (kill.first_new_token, kill.every_stream) == (1.0, math.inf)
    assert [failure.partition(": ")[0] for failure in kill.failures] == [
        "stream 1",
        "stream 2",
        "stream 3 had ended before the kill",
        "stream 4",
    ]
    assert kill.failures[0].endswith("from token 1 on")
    assert kill.failures[3].endswith("from token 2 on")


def test_the_first_new_token_is_judged_by_its_side() -> None:
    kills = [Kill(first_new_token=seconds, every_stream=seconds + 1, failures=[]) for seconds in (2.0, 4.0, 9.0)]
    assert not Side("spare", kills).kept
    assert Side("no-spare", kills).kept
    text = table([Side("spare", kills), Side("no-spare", kills)], 32).splitlines()
    assert [line.split()[-1] for line in text[2:]] == ["MISSED", "kept"]
    assert "4.00 (9.00)" in text[2]


@pytest.mark.parametrize(
    "flag",
    ["--no-worker-process", "--serve-arg=--no-worker-process", "--serve-arg=--worker_process=false"],
)
def test_without_a_worker_process_there_is_nothing_to_kill(flag: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with pytest.raises(ConfigError, match=r"^bench recovery needs a worker process to kill: [^\n]+$"):
        run(parser.parse_args([flag]))


def test_the_environment_and_a_file_can_take_the_worker_process_away_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_flags(["--batch-invariant", "--worker-process"])
    settings = tmp_path / "settings.toml"
    settings.write_text("[worker]\nworker_process = false\n")
    with pytest.raises(ConfigError, match="needs a worker process"):
        check_flags(["--config", str(settings)])
    monkeypatch.setenv(f"{ENV_PREFIX}WORKER_PROCESS", "false")
    with pytest.raises(ConfigError, match="needs a worker process"):
        check_flags([])


def test_a_server_without_a_worker_process_is_told_in_one_line() -> None:
    class Alone(OwnServer):
        def __init__(self) -> None:
            """There is no process."""

        def workers(self) -> list[int]:
            return []

    with pytest.raises(RuntimeError, match="^the server has no worker process to kill$"):
        asyncio.run(kill_under(Alone(), [], []))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_stream_goes_on_with_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    result = tmp_path / "result.json"
    small = ["--streams", "4", "--max-tokens", "1000", "--rounds", "1"]
    small += ["--serve-arg=--kv-cache-memory-bytes=4MiB", "--serve-arg=--num-threads=1"]
    model = write_tiny_model(tmp_path / "tiny")
    assert run(parser.parse_args(["--model", str(model), *small, "--result-json", str(result)])) == 0
    report = json.loads(result.read_text())
    assert [side["name"] for side in report["sides"]] == ["spare", "no-spare"]
    for side in report["sides"]:
        (kill,) = side["kills"]
        assert 0 < kill["first_new_token"] <= kill["every_stream"]
        assert kill["failures"] == []
    assert "first wanted within 3 s" in capsys.readouterr().out
