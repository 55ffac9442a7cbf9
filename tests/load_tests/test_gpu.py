"""The GPU's script, as far as a machine without one goes: its goals, its models, and its measures on small shapes."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from packaging.requirements import Requirement

from troupellm.kernels.paged_attention import cases as attention_cases
from troupellm.load_tests.flags.operations import OPERATIONS
from troupellm.load_tests.gpu import attention, engine, goals, measuring, session
from troupellm.load_tests.gpu.correctness import Correctness
from troupellm.load_tests.gpu.gathered import Partly
from troupellm.load_tests.gpu.models import config_of, write_model
from troupellm.load_tests.gpu.wheels import PACKAGES, THERE, command
from troupellm.load_tests.kernels import ceilings, shapes
from troupellm.load_tests.kernels.ceilings import ceiling_text
from troupellm.load_tests.kernels.checks import check
from troupellm.load_tests.roofline import SIZES, ModelSize
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.protocol.config.engine import EngineConfig
from troupellm.tests.support.gpu.gpu_models import CEILINGS, CPU, TINY, tiny_models


def test_every_goal_is_measured() -> None:
    numbers = [f"G{number}" for number in range(1, 28)]
    assert list(goals.GOALS) == [*numbers[:7], "G7b", *numbers[7:]]
    assert set(goals.FIRST) == {"G1", "G3", "G5", "G8", "G13", "G16"}
    assert set(measuring.measures(engine.Models(CPU, CEILINGS, Path()), {})) == set(goals.GOALS)
    assert {goals.COUNTING, *goals.PROFILED} <= set(goals.GOALS)


def test_targets_are_judged_one_by_one() -> None:
    result = goals.judged("G1", {"batch 1": 0.9, "batch 32": 0.8}, {})
    assert result.kept == {"batch 1": True, "batch 32": False}
    assert goals.judged("G5", {"8b": 1.5}, {}).kept == {"8b": True}
    text = goals.text(result)
    assert "MISSED" in text
    assert "batch 256" not in text
    assert "SKIPPED, no time" in goals.text(goals.judged("G1", {}, {}, "no time"))


@pytest.mark.parametrize("name", list(SIZES))
def test_models_are_read_by_our_families(name: str, tmp_path: Path) -> None:
    folder = write_model(name, tmp_path)
    described = describe_decoder(ConfigReader.load(folder))
    assert (described.num_layers, described.vocab_size) == (SIZES[name].layers, SIZES[name].vocab)
    assert ModelSize.of(config_of(name)) == SIZES[name]


def test_kernels_are_measured_against_the_read_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "KILO", 8)
    monkeypatch.setattr(attention, "SECONDS", 1e-3)
    monkeypatch.setitem(attention.SIZES, "qwen3-8b", TINY)
    found, details = attention.decode_bandwidth(CPU, CEILINGS)
    assert set(found) == {target.name for target in goals.GOALS["G8"].targets}
    assert found["1 x 32k"] == pytest.approx(details["1 x 32k"]["GB/s"] / 1e3)
    assert attention.skewed(CPU, CEILINGS)[0]["ratio"] > 0
    assert set(attention.drawing(CPU, CEILINGS)[0]) == {target.name for target in goals.GOALS["G15"].targets}


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> engine.Models:
    """The same measures on tiny models and a CPU."""
    return tiny_models(monkeypatch, tmp_path)


@pytest.mark.slow
def test_whole_models_are_measured(models: engine.Models, monkeypatch: pytest.MonkeyPatch) -> None:
    found, details = models.decode(engine.LARGE, (2,))
    assert set(found) == {"batch 2"}
    assert all(0 < fraction < 1 for fraction in found.values())
    assert details["batch 2"]["tokens/s"] == pytest.approx(2e3 / details["batch 2"]["engine ms"])
    assert details["batch 2"]["runs"] == len(details["batch 2"]["engine ms of each"]) == 2
    kernels = models.kernels(engine.LARGE, 1)
    assert kernels > 10
    assert set(models.tax({engine.LARGE: kernels, engine.SMALL: 9})[0]) == {"8b", "0.6b"}
    with pytest.raises(Partly, match=r"0\.6b: .* not counted"):
        models.tax({engine.LARGE: kernels})
    monkeypatch.setattr(engine, "ABOVE", {engine.LARGE: (1, 3), engine.SMALL: (1,)})
    assert set(models.above_the_worker()[0]) == {"8b batch 1", "8b batch 3", "0.6b batch 1"}


def test_the_engine_is_compared_with_its_graph_at_all_batches() -> None:
    told = {f"{engine.SHORT[name]} batch {batch}" for name, batches in engine.ABOVE.items() for batch in batches}
    assert told == {target.name for target in goals.GOALS["G13"].targets}


def test_the_script_starts_anywhere_and_says_that_there_is_no_device(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    script = Path(session.__file__).with_name("run.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "there is no CUDA device here\n")


SMALL = """
import torch
from troupellm.load_tests.gpu import attention
with torch.inference_mode():
    for starts, counts in (([20, 0, 31], [1, 1, 1]), ([17, 3], [18, 5])):
        assert attention._error(torch.device("cpu"), 8, 2, 32, starts, counts) < attention.LARGEST_ERROR
"""


CHECKS = """
import itertools
import torch
from troupellm.load_tests.kernels.checks import CHECKS_OF
with torch.inference_mode():
    for name in ("decode", "prefill", "verify", "coded_cache", "latent"):
        checks = CHECKS_OF[f"{name}_attention"]("cpu:0")  # a name that is not the CPU's, for the same memory
        some = list(itertools.islice(checks, 4))
        assert some and all(outcome.error() <= 1 for outcome in some), name
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [SMALL, CHECKS], ids=["small", "checks"])
def test_the_reference_of_attention_is_attention(code: str) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_wheels_are_of_the_other_machine() -> None:
    told = command(".whl", "3.12", "msgspec")
    assert told[-1] == "msgspec"
    assert json.dumps(told).count("manylinux_2_28_x86_64") == 1
    assert told[told.index("--python-version") + 1] == "3.12"


def test_wheels_are_all_that_the_other_machine_lacks() -> None:
    written = tomllib.loads((Path(session.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {Requirement(line).name for line in written["project"]["dependencies"]}
    assert needed <= {*THERE, *PACKAGES}
    assert not set(THERE) & set(PACKAGES)


def test_only_the_graph_that_is_measured_is_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And before the steps that count: a capture takes as long as dozens of them."""
    asked: list[dict[str, Any]] = []

    def through(model: Path, settings: dict[str, Any], *_: object, **more: Any) -> list[float]:
        asked.append(settings | {"warm_up": more["warm_up"]})
        return [3.0, 1.0, 2.0]

    monkeypatch.setattr(engine, "through_engine", through)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert engine.Models(torch.device("cuda"), CEILINGS, tmp_path).engine_step(engine.LARGE, 32) == 2.0
    engine.Models(CPU, CEILINGS, tmp_path).engine_step(engine.LARGE, 8)
    assert [one.get("cudagraph_capture_sizes") for one in asked] == [(32,), None]
    assert all(one["warm_up"] >= 4 for one in asked)  # the second token's step captures it
    settings = {name: value for name, value in asked[0].items() if name != "warm_up"}
    EngineConfig.from_flat({"model": "m"} | settings)
    assert settings["max_num_prefill_tokens"] == settings["max_num_batched_tokens"]


def test_every_operation_that_a_goal_needs_is_checked() -> None:
    assert {operation for goal in goals.GOALS.values() for operation in goal.needs} <= set(OPERATIONS)
    assert all(goal.needs for goal in goals.GOALS.values())
    assert Correctness().whole  # where checks were left out


def test_attention_is_checked_by_the_kernel_that_computes_it() -> None:
    names = [{one.case for one in check(name, CPU)} for name in ("decode_attention", "prefill_attention")]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {case.name for case in attention_cases.CASES}
    assert set(attention.REAL) == {"decode_attention", "prefill_attention"}
    assert not attention.real_checks("linear", CPU)


def test_a_worker_is_loaded_into_free_memory(models: engine.Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user of the worker before it may hold on to it until then."""
    done = list[str]()

    class Worker:
        def __init__(self, *_: object) -> None:
            done.append("loaded")

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setattr(engine, "BareWorker", Worker)
    monkeypatch.setattr(engine.Models, "free", lambda self: done.append("freed"))
    with models.worker(engine.LARGE, 1, 16):
        pass
    assert done == ["freed", "loaded", "closed", "freed"]


def test_a_bare_graph_is_what_the_tax_is_of() -> None:
    assert engine.WorkerStep(3e-3, 2e-3).bare == 2e-3
    assert engine.WorkerStep(3e-3, None).bare == 3e-3


def test_a_type_whose_ceiling_is_missing_has_no_roofline() -> None:
    """That of a wider type would make its goals easier."""
    lacking = msgspec.structs.replace(CEILINGS, gemm_fp8=0.0)
    assert engine.Models(CPU, lacking, Path()).roof().block_flops == CEILINGS.gemm_bfloat16
    with pytest.raises(RuntimeError, match="fp8 was not measured"):
        engine.Models(CPU, lacking, Path()).roof("fp8")


def test_a_ceiling_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise RuntimeError("no such kernel")

    found, failed = ceilings.measured_one_by_one({"gemm_fp8": fail, "to_host": lambda: 2.0})
    assert (found, failed) == ({"to_host": 2.0}, {"gemm_fp8": "RuntimeError: no such kernel"})
    measured = ceilings.Measured(device="x", read=1.0, copy=1.0, failed=failed, **found)
    assert measured.gemm_fp8 == 0.0
    assert "gemm_fp8 was not measured (RuntimeError: no such kernel)" in ceiling_text(measured)


def test_buffers_of_attention_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large they are."""
    made, caches = list[int](), shapes.Shapes.caches
    monkeypatch.setattr(shapes, "COLD_BYTES", 1)
    monkeypatch.setattr(shapes.Shapes, "caches", lambda self, *given: made.append(given[0]) or caches(self, *given))
    next(shapes.Shapes(TINY, CPU, torch.float32, 8).attention("attention", [7], [1])).run(0)
    assert len(made) == 2
