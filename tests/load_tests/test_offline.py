"""The benchmarks that run the engine in their own process, at their smallest, and their arithmetic."""

import argparse
import asyncio
import json
import math
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from troupellm.load_tests import cli
from troupellm.load_tests.bench.heartbeat import summary
from troupellm.load_tests.bench.throughput import Entry, _compete, summarise, table
from troupellm.load_tests.contestants.workload import Request, mixed, turns
from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.workers.meter import Meter


def bench(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.command(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    return int(args.func(args))


def test_workload_keeps_its_borders() -> None:
    requests = mixed(200, (16, 20), (1, 3), vocab_size=10, seed=1)
    assert {len(request.prompt) for request in requests} == set(range(16, 21))
    assert {request.output_len for request in requests} == {1, 2, 3}
    assert {token for request in requests for token in request.prompt} == set(range(10))
    assert requests == mixed(200, (16, 20), (1, 3), vocab_size=10, seed=1)


def test_ratios_are_of_medians() -> None:
    def entry(seconds: list[float], answers: list[list[int]]) -> Entry:
        requests = [Request(prompt=[1], output_len=2), Request(prompt=[1, 2], output_len=4)]
        return Entry(contestant=None, requests=requests, seconds=seconds, answers=answers)  # type: ignore[arg-type]

    report = summarise(
        {
            "troupellm": entry([1.0, 2.0, 9.0], [[1, 2], [3, 4, 5, 6]]),
            "generate": entry([6.0, 5.0, 7.0], [[1, 2], [3, 4, 5, 7]]),
        }
    )
    assert report["contestants"]["troupellm"]["median_tokens_per_s"] == 3.0
    assert report["contestants"]["troupellm"]["prompt_tokens"] == 3
    assert report["ratios"] == {"troupellm / generate": {"ratio": 3.0, "wanted": 2.5}}
    assert report["same_tokens_as_generate"] == {"troupellm": 0.5}
    assert "3.00 x   wanted 2.5 x   kept" in table(report)


def test_the_large_model_has_its_size() -> None:
    assert SHAPES["125m"].num_parameters == pytest.approx(125e6, rel=0.01)


def test_random_model_is_seeded_and_loads_elsewhere(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    one, two = (write_random_model(tmp_path / name, SHAPES["tiny"], seed=3) for name in ("one", "two"))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(one)
    assert sum(weight.numel() for weight in model.parameters()) == SHAPES["tiny"].num_parameters


def test_meter_counts_running_time_and_passes_everything_through() -> None:
    meter = Meter()

    class Pause:
        def __await__(self) -> Generator[str, int, int]:
            return (yield "waiting")

    async def work(value: int) -> int:
        try:
            await Pause()
        except KeyError:
            return value + 1
        return value

    timed = meter.task("work", work)
    coroutine = timed(4)
    assert coroutine.send(None) == "waiting"
    with pytest.raises(StopIteration) as end:
        coroutine.throw(KeyError())
    assert end.value.value == 5
    assert meter.seconds["work"] > 0
    assert meter.call("sum", math.fsum)([1, 2]) == 3


def test_a_heartbeat_summary_has_its_percentiles() -> None:
    assert summary([0.001 * number for number in range(1, 101)]) == pytest.approx(
        {"beats": 100, "p50_ms": 51.0, "p99_ms": 100.0, "worst_ms": 100.0}
    )
    assert summary([])["worst_ms"] == 0.0


@pytest.mark.parametrize("flush_ms", [20.0, 0.0])
def test_bench_chain_reports_the_cost_of_each_part(tmp_path: Path, flush_ms: float) -> None:
    result = tmp_path / "chain.json"
    assert (
        bench(
            "chain",
            "--running",
            "3",
            "--flush-ms",
            str(flush_ms),
            "--windows",
            "2",
            "--window-steps",
            "10",
            "--result-json",
            str(result),
        )
        == 0
    )
    (row,) = json.loads(result.read_text())
    assert (row["running"], row["flush_ms"]) == (3, flush_ms and 3000 / 1600)
    for part in ("total", "plan", "update", "scheduler", "worker", "output"):
        assert row[part] > 0


def test_bench_heartbeat_reports_each_phase(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", SHAPES["tiny"])
    result = tmp_path / "beat.json"
    argv = ["--streams", "2", "--max-tokens", "8", "--long-prompt-chars", "20000", "--num-threads", "1"]
    assert bench("heartbeat", "--model", str(folder), *argv, "--result-json", str(result)) == 0
    report = json.loads(result.read_text())
    assert {"idle loop", "second start-up", "2 streams", "and long prompts", "shut-down"} < set(report)


def test_contestants_take_turns_in_another_order_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [turns(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert turns(["a", "b", "c"], 2) == ["c", "a", "b"]
    assert turns([], 3) == []
    order: list[Any] = []

    async def turn(entry: Any) -> float:
        order.append(entry)
        return 1.0

    monkeypatch.setattr("troupellm.load_tests.bench.throughput._turn", turn)
    one, other = (Entry(None, [], [], []) for _ in range(2))  # type: ignore[arg-type]
    asyncio.run(_compete({"one": one, "other": other}, 2))
    assert [entry is one for entry in order] == [True, False, False, True, True, False]
    assert (one.seconds, other.seconds) == ([1.0, 1.0], [1.0, 1.0])


def test_bench_throughput_reports_each_contestant(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = tmp_path / "throughput.json"
    assert (
        bench(
            "throughput",
            "--preset",
            "tiny",
            "--num-requests",
            "5",
            "--input-len",
            "4",
            "20",
            "--output-len",
            "2",
            "9",
            "--batch-size",
            "3",
            "--repeats",
            "1",
            "--num-threads",
            "1",
            "--one-output-len",
            "4",
            "--result-json",
            str(result),
        )
        == 0
    )
    report: dict[str, Any] = json.loads(result.read_text())
    assert set(report["contestants"]) == {"troupellm", "generate", "continuous", "troupellm-one", "generate-one"}
    assert set(report["same_tokens_as_generate"].values()) == {1.0}
    assert len(report["ratios"]) == 3


def test_bench_scheduler_reports_the_cost_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    small = ("--running", "4", "--window-steps", "4", "--windows", "2", "--prompt-tokens", "200", "--admissions", "2")
    assert bench("scheduler", *small, "--no-chain", "--against-vllm", "--result-json", str(report)) == 0
    found = json.loads(report.read_text())
    assert found["steps"]["4"]["total"] == found["steps"]["4"]["plan"] + found["steps"]["4"]["update"] > 0
    assert min(min(costs.values()) for costs in found["admission"].values()) > 0
    if find_spec("vllm") is None:
        assert found["vllm"] is None
        assert "vLLM is not installed" in capsys.readouterr().out


def test_overload_runs_at_its_smallest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    sizes = ("--seconds", "0.3", "--step-ms", "1", "--output-len", "4", "--max-num-seqs", "2")
    assert bench("overload", *sizes, "--max-num-queued-reqs", "4", "--result-json", str(result)) == 0
    report = json.loads(result.read_text())
    assert report["refused"] > 0
    assert report["flooded_refused"] == 0
    assert "beside the flood" in capsys.readouterr().out
