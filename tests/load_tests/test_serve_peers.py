"""`bench serve --peers`: how servers are started, what is judged, and a run in small of one of our layouts."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from troupellm.load_tests import cli
from troupellm.load_tests.peers.process import ContestantError
from troupellm.load_tests.peers.serve_command import Measured, PeerBench, judge, judgement_text, table
from troupellm.load_tests.peers.server_process import ServerProcess
from troupellm.load_tests.peers.servers import LAYOUTS, SERVERS, ServerPlan, plan_server
from troupellm.server.cli.flags import load_configs


def measured(itl: float, ttft: float, rate: float) -> Measured:
    return Measured(itl_ms=[itl, itl, 100 * itl], tpot_ms=[itl], ttft_ms=[ttft], rate=[rate, 0.0, 2 * rate])


def plan(name: str, folder: Path) -> ServerPlan:
    return plan_server(name, model=folder / "model", peers=folder, link=folder, threads=2, sequences=16, length=256)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_our_layouts_are_settings_that_the_server_takes(name: str, tmp_path: Path) -> None:
    from troupellm.server.cli.serve import register

    command = plan(name, tmp_path).command
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(command[command.index("serve") :])
    arguments.config_model = arguments.model_argument
    engine, server = load_configs(arguments)
    assert (engine.scheduler.max_num_seqs, engine.worker.num_threads, engine.cache.enable_prefix_caching) == (
        16,
        2,
        False,
    )
    assert engine.worker.spare_worker is False
    if name != "troupellm":
        assert engine.worker.worker_process is name.startswith("process")
        assert server.api_server_count == int(name.endswith("front"))


def test_rivals_are_started_from_their_environments(tmp_path: Path) -> None:
    for name in ("llama", "vllm"):
        with pytest.raises(ContestantError, match=f"{name}: not installed"):
            plan(name, tmp_path)
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
        (tmp_path / name / ".installed").touch()
    with pytest.raises(ContestantError, match="llama-server"):
        plan("llama", tmp_path)
    (tmp_path / "llama" / "build" / "bin").mkdir(parents=True)
    (tmp_path / "llama" / "build" / "bin" / "llama-server").touch()
    command = plan("llama", tmp_path).command
    assert command[command.index("--ctx-size") + 1] == "4096"
    rival = plan("vllm", tmp_path)
    assert rival.command[0] == str(tmp_path / "vllm" / "bin" / "python")
    assert rival.environment["VLLM_CPU_OMP_THREADS_BIND"].count(",") == min(1, len(os.sched_getaffinity(0)) - 1)
    assert set(SERVERS) == {*LAYOUTS, "llama", "vllm"}


def test_goals_are_judged_against_the_best_peer() -> None:
    found = {
        "24m": {
            "troupellm": measured(3.0, 10.0, 700.0),
            "llama": measured(2.8, 12.0, 658.0),
            "vllm": measured(11.2, 9.0, 500.0),
        },
        "125m": {"troupellm": measured(9.0, 10.0, 240.0), "llama": measured(9.0, 12.0, 184.0)},
        "alone": {"troupellm": measured(1.0, 1.0, 1.0)},
    }
    verdicts = judge(found)
    assert [round(one.found, 2) for one in verdicts] == [1.07, 1.11, 1.06, 1.30]
    assert [one.reached for one in verdicts] == [True, False, False, True]
    assert [one.kept for one in verdicts] == [True, False, False, False]
    assert [one.missing for one in verdicts] == [(), (), (), ("vllm",)]
    turned = judge(dict(reversed(found.items())))
    assert sorted(one.what for one in turned) == sorted(one.what for one in verdicts)
    assert "at most 1.10x   kept" in judgement_text(verdicts)
    assert "at least 1.20x   not shown; numbers MISSING of vllm" in judgement_text(verdicts)
    assert table("24m", 16, found["24m"]).splitlines()[1].split() == ["troupellm", "10.00", "3.00", "3.00", "700.0"]


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    server = ServerProcess(ServerPlan(name="x", command=command, environment={}, port=1, body={}), tmp_path / "log")
    with pytest.raises(ContestantError, match="no such model"):
        server.wait_ready(60.0)
    server.close()


class Failing:
    """A server that stops answering."""

    closed = False

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        raise ContestantError("llama: 1 requests failed: HTTP 500")
        yield

    def close(self) -> None:
        self.closed = True


def test_a_server_that_is_named_twice_is_started_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them would be left behind, stopped."""
    started: list[str] = []
    monkeypatch.setattr(PeerBench, "_start", lambda self, name, *_: started.append(name))
    args = argparse.Namespace(num_threads=1, streams=2, rounds=1, result_json=None)
    PeerBench(args, tmp_path).compete("tiny", ["llama", "troupellm", "llama"])
    assert started == ["llama", "troupellm"]


def test_a_server_that_fails_later_has_no_numbers(tmp_path: Path) -> None:
    args = argparse.Namespace(
        num_threads=1, streams=2, one_requests=1, seed=0, random_input_len=4, random_output_len=4, result_json=None
    )
    bench, server, found = PeerBench(args, tmp_path), Failing(), measured(1.0, 1.0, 1.0)
    servers: dict[str, Any] = {"llama": server}
    bench._turn("llama", "tiny", 3, servers, found)
    assert (servers, server.closed, found.medians()) == ({}, True, {})
    assert bench.failures == ["tiny: llama: 1 requests failed: HTTP 500"]


@pytest.mark.slow
def test_bench_serve_with_peers_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    cli.command(parser.add_subparsers())
    result = tmp_path / "result.json"
    args = parser.parse_args(
        [
            "bench",
            "serve",
            "--peers",
            "troupellm",
            "vllm",
            "--configs",
            "tiny",
            "--streams",
            "2",
            "--one-requests",
            "1",
            "--rounds",
            "1",
            "--num-threads",
            "1",
            "--random-input-len",
            "8",
            "--random-output-len",
            "8",
            "--peers-dir",
            str(tmp_path / "none"),
            "--result-json",
            str(result),
        ]
    )
    assert args.func(args) == 1
    report = json.loads(result.read_text())
    assert report["found"]["tiny"]["troupellm"]["medians"]["rate"] > 0
    given = {"num_threads": 1, "rounds": 1, "input_len": 8, "output_len": 8, "streams": 2, "one_requests": 1}
    assert given.items() <= report.items()
    assert report["processor"]
    assert "vllm: not installed" in report["failures"][0]
    assert "2 streams, tokens/s" in capsys.readouterr().out
