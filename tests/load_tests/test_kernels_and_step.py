"""`bench kernels` and `bench step` in small: correctness comes first, and the numbers are what they say."""

import argparse
import gc
import json
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from troupellm.kernels import cpp
from troupellm.load_tests import cli
from troupellm.load_tests.bench.kernels import measured, size_of
from troupellm.load_tests.bench.step import Row, line
from troupellm.load_tests.flags.operations import MODELS, OPERATIONS
from troupellm.load_tests.kernels import ceilings, checks
from troupellm.load_tests.kernels.ceilings import Measured
from troupellm.load_tests.kernels.checks import check
from troupellm.load_tests.kernels.outcome import Outcome
from troupellm.load_tests.kernels.shapes import Shapes, Work
from troupellm.load_tests.kernels.timing import measure
from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.step.above import steady_step_seconds
from troupellm.load_tests.step.bare import BareWorker
from troupellm.load_tests.step.profile import PROFILED_STEPS, Parts, parts_of_steps, recorded_steps
from troupellm.protocol.config.engine import EngineConfig

CPU = torch.device("cpu")


def bench(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.command(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    return int(args.func(args))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_checked_before_it_is_measured(operation: str) -> None:
    found = check(operation, CPU)
    assert found
    assert all(one.right for one in found), [one for one in found if not one.right]


def test_what_is_wrong_is_seen() -> None:
    one = torch.ones(3)
    assert Outcome("same", one, one.clone()).error() == 0.0
    assert Outcome("exact", one, one + 1e-6).error() == float("inf")
    assert Outcome("near", one, one + 1e-3, 1e-2).error() < 1 < Outcome("far", one, one + 1.0, 1e-2).error()
    assert Outcome("nan", one / 0 * 0, one, 1e-2).error() == float("inf")
    assert Outcome("shape", one, torch.ones(4), 1e-2).error() == float("inf")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_case_takes_zeros_for_right(operation: str) -> None:
    for outcome in checks.CHECKS_OF[operation]("cpu"):
        zeros = msgspec.structs.replace(outcome, got=torch.zeros_like(outcome.expected))
        assert zeros.error() > 1, outcome.case


def test_a_wrong_operation_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "silu_mul", lambda gate_up: gate_up[..., ::2] * 0)
    result = tmp_path / "result.json"
    argv = ("--operations", "silu_mul", "rms_norm", "--model", "24m", "--batches", "2", "--seconds", "0.001")
    monkeypatch.setattr("troupellm.load_tests.bench.kernels.measure_ceilings", lambda *_: CEILINGS)
    assert bench("kernels", *argv, "--result-json", str(result)) == 1
    report = json.loads(result.read_text())
    assert {one["operation"] for one in report["found"]} == {"rms_norm"}
    assert {"model": "24m", "device": "cpu", "dtype": "float32", "context": 1024}.items() <= report.items()
    assert "is WRONG" in capsys.readouterr().out


def test_the_ceiling_of_products_is_the_best_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower of two products is no ceiling."""
    monkeypatch.setattr(ceilings, "CPU_BYTES", 2**12)
    monkeypatch.setattr(ceilings, "CPU_SIDE", 32)
    monkeypatch.setattr(ceilings, "_int8_rate", lambda *_: 1.0)
    assert set(ceilings.float32_rates(CPU, 1e-4)) == {"torch.mm", "packed"}
    monkeypatch.setattr(ceilings, "float32_rates", lambda *_: {"torch.mm": 45e9, "packed": 113e9})
    assert ceilings.measure_ceilings(CPU, 1e-4).gemm_float32 == 113e9


CEILINGS = Measured(device="made up", read=1e9, copy=1e9, gemm_float32=1e12, gemm_int8=2e12)


def test_the_fraction_is_of_the_tighter_limit() -> None:
    """A work that takes at least so long cannot be faster than its limits by more than its bytes say."""
    work = Work("w", lambda number: torch.empty(0), size=1e9, flops=1e12, kind="float32")
    found = measured("w", 1, work, CPU, 1e-3, CEILINGS)
    assert found.fraction * found.timing.median == pytest.approx(1.0)
    int8 = Work("w", lambda number: torch.empty(0), size=1e6, flops=1e12, kind="int8")
    found = measured("w", 1, int8, CPU, 1e-3, CEILINGS)
    assert (found.fraction * found.timing.median, found.bound) == (pytest.approx(0.5), "arithmetic")


def test_products_count_their_weights() -> None:
    size = size_of("24m")
    works = list(Shapes(size, CPU, torch.float32, 16).works("linear", 2))
    assert sum(work.flops for work in works) == 4 * (size.dense_params / size.layers + size.head_params)
    assert works[0].bytes == 4 * (288 * 864 + 2 * (288 + 864))
    assert works[0].run(0).shape == (2, 864)
    assert all(size_of(model).layers for model in MODELS)


def test_attention_counts_the_cache() -> None:
    work = next(Shapes(size_of("24m"), CPU, torch.float32, 20).attention("a", [19, 0], [1, 20]))
    assert work.bytes == 4 * (2 * 40 * 288 + 2 * 21 * 288)
    assert work.flops == 4 * 288 * (20 + 210)
    assert not work.run(0).isnan().any()


def test_the_seconds_of_a_steady_step_are_those_while_all_run() -> None:
    """Two sequences, a token each per step of 10 ms, while both run."""
    one = [(0.0, 1), (0.01, 1), (0.02, 1), (0.03, 1), (0.04, 1)]
    two = [(0.02, 1), (0.03, 1), (0.05, 2)]
    assert steady_step_seconds([one, two]) == pytest.approx(0.02 * 2 / 3)
    with pytest.raises(ValueError, match="more --steps"):
        steady_step_seconds([one, [(0.5, 1), (0.6, 1)]])


def test_a_row_reports_roofline_shares_kernel_tax_and_rates() -> None:
    report: dict[str, Any] = Row(4, 1e-3, {"worker": 2e-3, "engine": 4e-3}, Parts(100, 0.05, 100.0)).report()
    assert report["roof_frac"] == {"worker": 0.5, "engine": 0.25}
    assert report["kernel_tax_us"] == pytest.approx(10.0)
    assert report["tokens_per_s"] == {"worker": 2000.0, "engine": 1000.0}
    with_graph = Row(4, 1e-3, {"worker": 2e-3}, Parts(100, 0.0, 0.0), graph=1.5e-3)
    assert with_graph.report()["kernel_tax_us"] == pytest.approx(5.0)
    assert "1.500" in line(with_graph, ["worker"])


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[BareWorker]:
    folder = write_random_model(tmp_path / "model", SHAPES["tiny"])
    settings = {"model": str(folder), "num_gpu_blocks_override": 36, "max_num_seqs": 3, "dtype": "float32"}
    worker = BareWorker(folder, EngineConfig.from_flat({**settings, "block_size": 16, "num_threads": 1}))
    yield worker
    worker.close()


def test_the_bare_worker_decodes_again_and_again(bare: BareWorker) -> None:
    for _ in range(2):
        bare.fill(3, 20, 30)
        assert len(bare.decode(12)) == 11
        assert bare.step_seconds(8) > 0


def test_time_outside_of_operators_is_of_the_least_disturbed_step() -> None:
    """Microseconds of steps and of their operators; the second was interrupted between two operators."""
    steps = [event(100, [60, 30]), event(5000, [60, 30]), event(120, [60, 36])]
    parts = parts_of_steps(steps)
    assert (parts.kernels, parts.outside_us) == (2, 24)
    assert parts.outside == pytest.approx(0.2)


def event(time: float, parts: list[float]) -> Any:
    return SimpleNamespace(cpu_time_total=time, cpu_children=[event(part, []) for part in parts])


def test_native_calls_count_as_operators(bare: BareWorker) -> None:
    bare.fill(3, 20, 30)
    steps, compiled = recorded_steps(bare.decode), cpp.load() is not None
    assert len(steps) == PROFILED_STEPS
    for step in steps:
        names = [part.name for part in step.cpu_children]
        assert names.count("native::decode_step" if compiled else "host::argmax") == 1
        assert 0 < sum(part.cpu_time_total for part in step.cpu_children) < step.cpu_time_total


def test_steady_steps_keep_nothing(bare: BareWorker) -> None:
    """Neither objects and arrays nor tensors: what a step allocates it gives back. Caches that fill by chance may grow
    in a round, not in each."""
    tracemalloc.start()
    try:
        rounds = []
        for _ in range(10):
            bare.fill(3, 20, 120)
            bare.decode(100)
            rounds.append(held())
    finally:
        tracemalloc.stop()
    grown = [later[0] - earlier[0] for earlier, later in pairwise(rounds)]
    assert min(grown) < 100 * 16, grown  # no object is smaller, and what steps keep grows in every round by 100 of them
    assert rounds[-1][1] == rounds[1][1]


def held() -> tuple[int, int]:
    """Bytes that Python and numpy hold, and bytes of tensors."""
    gc.collect()
    tensors = sum(found.nbytes for found in gc.get_objects() if type(found) is torch.Tensor)
    return tracemalloc.get_traced_memory()[0], tensors


@pytest.mark.slow
def test_bench_kernels_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    argv = ("--model", "24m", "--batches", "1", "--context", "16", "--seconds", "0.001", "--num-threads", "1")
    assert bench("kernels", *argv, "--result-json", str(result)) == 0
    report = json.loads(result.read_text())
    assert {one["operation"] for one in report["found"]} == {*OPERATIONS} - {"fused_moe", "coded_experts"}
    assert report["ceilings"]["read"] > 1e8
    assert "cases are right" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_bench_step_cleans_up_where_it_is_ended(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server is in a session of its own, and would be left behind."""

    def measure(*_: object) -> None:
        handler = signal.getsignal(number)
        assert callable(handler), "it would end at once"
        handler(number, None)

    monkeypatch.setattr("troupellm.load_tests.bench.step.StepBench", measure)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as left:
            bench("step", "--model", "tiny", "--num-threads", "1")
    finally:
        signal.signal(number, before)
    assert left.value.code == 128 + number


@pytest.mark.slow
def test_bench_step_in_small(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    argv = ("--model", "tiny", "--batches", "2", "--context", "8", "--steps", "8", "--seconds", "0.001")
    assert bench("step", *argv, "--num-threads", "1", "--result-json", str(result)) == 0
    report = json.loads(result.read_text())
    given = {"model": "tiny", "device": "cpu", "dtype": "float32", "context": 8, "steps": 8, "num_threads": 1}
    assert given.items() <= report.items()
    row = report["rows"][0]
    assert set(row["seconds"]) == {"worker", "engine", "http"}
    assert row["parts"]["kernels"] >= 1  # of a step that is one compiled call
    assert set(row["roof_frac"]) == {"worker", "engine", "http"}
    assert min(row["roof_frac"].values()) > 0  # no more than that: a model that fits in the caches has no roof


def test_timing_waits_for_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a device do not wait for each other: tables may still be on their way when a kernel reads them."""
    did = list[str]()

    class Stream:
        def wait_stream(self, other: object) -> None:
            did.append(f"wait for {other}")

        def synchronize(self) -> None: ...

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self, stream: object) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, end: object) -> float:
            return 1e3

    fakes = {"Stream": lambda device: Stream(), "Event": Event, "current_stream": lambda device: "the current one"}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    measure(lambda number: did.append("work"), torch.device("cuda"), 1e-3)
    assert did[:2] == ["wait for the current one", "work"]
