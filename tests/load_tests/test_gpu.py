"""The GPU's script, as far as a machine without one goes: its goals, its models, and its measures on small shapes."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from tests.support.gpu_models import CEILINGS, CPU, TINY, tiny_models
from troupellm.kernels.paged_attention import cases as attention_cases
from troupellm.load_tests.gpu import attention, engine, goals, session
from troupellm.load_tests.gpu.checking import Unfinished, begin, results
from troupellm.load_tests.gpu.correctness import Correctness
from troupellm.load_tests.gpu.gathered import Gathered, Partly
from troupellm.load_tests.gpu.models import config_of, write_model
from troupellm.load_tests.gpu.wheels import PACKAGES, THERE, command
from troupellm.load_tests.kernels.checks import Check, check
from troupellm.load_tests.kernels.flags import OPERATIONS
from troupellm.load_tests.roofline import SIZES, ModelSize
from troupellm.load_tests.step.profile import Parts
from troupellm.models.hf_config import ConfigReader
from troupellm.models.registry import describe_decoder
from troupellm.protocol.config import EngineConfig
from troupellm.protocol.errors import ConfigError


def test_every_goal_is_measured() -> None:
    numbers = [f"G{number}" for number in range(1, 28)]
    assert list(goals.GOALS) == [*numbers[:7], "G7b", *numbers[7:]]
    assert set(goals.FIRST) == {"G1", "G3", "G5", "G8", "G13", "G16"}
    measures = session.Session(CPU, Path(), None, 0.0)._measures(CEILINGS)
    assert set(measures) == set(goals.GOALS)


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
def test_whole_models_are_measured(models: engine.Models) -> None:
    found, details = models.decode(engine.LARGE, (2,))
    assert set(found) == {"batch 2"}
    assert all(0 < fraction < 1 for fraction in found.values())
    assert details["batch 2"]["tokens/s"] == pytest.approx(2e3 / details["batch 2"]["ms"])
    taxes, parts = models.tax()
    assert set(taxes) == {"8b", "0.6b"}
    assert parts["8b"]["kernels"] > 10
    assert set(models.above_the_worker()[0]) == {target.name for target in goals.GOALS["G13"].targets}


def test_what_refuses_by_name_is_skipped_by_name(models: engine.Models, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    one = session.Session(CPU, tmp_path, str(result), float("inf"))
    models._device = torch.device("cuda")
    skipped = one._pursued("G3", lambda: models.decode(engine.SMALL, (1,)))
    assert "cuda" in skipped.skipped
    assert not one.failed
    late = session.Session(CPU, tmp_path, None, 0.0)._pursued("G3", lambda: ({}, {}))
    assert "are left" in late.skipped
    soon = time.monotonic() + goals.GOALS["G3"].seconds + session.LAST_SECONDS / 2  # the last ceilings need theirs, too
    assert "are left" in session.Session(CPU, tmp_path, None, soon)._pursued("G3", lambda: ({}, {})).skipped


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


@pytest.mark.slow
def test_what_attention_is_compared_with_is_attention() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", SMALL], check=True, env=environment)


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

    def through(model: Path, settings: dict[str, Any], *_: object, **more: Any) -> float:
        asked.append(settings | more)
        return 1.0

    monkeypatch.setattr(engine, "through_engine", through)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    engine.Models(torch.device("cuda"), CEILINGS, tmp_path).engine_step(engine.LARGE, 32)
    engine.Models(CPU, CEILINGS, tmp_path).engine_step(engine.LARGE, 8)
    assert [one.get("cudagraph_capture_sizes") for one in asked] == [(32,), None]
    assert all(one["warm_up"] >= 4 for one in asked)  # the second token's step captures it
    settings = {name: value for name, value in asked[0].items() if name not in ("warm_up", "steps")}
    EngineConfig.from_flat({"model": "m"} | settings)
    assert settings["max_num_prefill_tokens"] == settings["max_num_batched_tokens"]


@pytest.mark.slow
def test_operations_are_checked_side_by_side(tmp_path: Path) -> None:
    found = results(begin(("silu_mul", "no_operation"), CPU, tmp_path), 180.0)
    assert isinstance(found["silu_mul"], list)
    assert len(found["silu_mul"]) > 2
    assert all(one.right for one in found["silu_mul"])
    assert found["no_operation"] == Unfinished("KeyError: 'no_operation'")
    late = begin(("silu_mul",), CPU, tmp_path)
    assert results(late, 0.0) == {"silu_mul": Unfinished("it was not done in time", late=True)}
    assert late["silu_mul"].returncode == -signal.SIGKILL


RIGHT, WRONG = Check("rope", "one", 0.5), Check("rope", "two", 3.0)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Any]], session.Session]:
    """A session whose operations were found so."""

    def made(found: dict[str, Any]) -> session.Session:
        given = iter([{name: found.get(name, [RIGHT]) for name in OPERATIONS}, {"model:m": Unfinished("no memory")}])
        monkeypatch.setattr(session, "begin", lambda tasks, *_: tasks)
        monkeypatch.setattr(session, "begin_models", lambda names, *_: names)
        monkeypatch.setattr(session, "results", lambda *_: next(given))
        one = session.Session(CPU, tmp_path, str(tmp_path / "result.json"), float("inf"))
        one.check(1.0)
        return one

    return made


def test_what_is_wrong_holds_up_what_needs_it_alone(
    checked: Callable[..., session.Session], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it is timed, and all else is."""
    one = checked({
        "grouped_linear": Unfinished("it ended with 1"), "fused_moe": Unfinished("it was not done in time", late=True),
        "decode_attention": [RIGHT, WRONG], "row_codes": [WRONG],
    })  # fmt: skip
    assert one.failed
    told = json.loads((tmp_path / "result.json").read_text())["correctness"]
    assert told["wrong"] == {"decode_attention": ["two: 3 times"], "row_codes": ["two: 3 times"]}
    assert (told["late"], told["broken"]) == (["fused_moe"], {"grouped_linear": "it ended with 1"})
    assert told["worst"]["rms_norm"] == 0.5
    timed = list[str]()
    results = {
        name: one._pursued(name, lambda name=name: timed.append(name) or ({"x": 1.0}, {})) for name in goals.GOALS
    }
    assert timed == ["G10", "G15"]
    assert results["G8"].skipped == "decode_attention is wrong (two: 3 times)"
    assert results["G2"].skipped.count("is wrong") == 2
    assert "fused_moe was not checked in time" in results["G4"].skipped
    assert "model:m: no memory" in capsys.readouterr().out


def test_an_operation_that_nothing_waits_for_holds_nothing_up(checked: Callable[..., session.Session]) -> None:
    one = checked({"grouped_linear": [WRONG]})
    assert one.failed
    assert not any(one._checked.objections(name) for name in goals.GOALS)
    assert not checked({}).failed


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


def test_a_part_that_fails_leaves_the_others_their_numbers(tmp_path: Path) -> None:
    def measure(error: Exception) -> Any:
        gathered = Gathered()
        for batch in (1, 256):
            with gathered.part(f"batch {batch}"):
                if batch > 1:
                    raise error
                gathered.found[f"batch {batch}"] = 0.9
        return gathered.all()

    for error, failed in ((RuntimeError("no memory"), True), (ConfigError("does not fit", param="x"), False)):
        with pytest.raises(Partly):
            measure(error)
        one = session.Session(CPU, tmp_path, None, float("inf"))
        result = one._pursued("G1", partial(measure, error))
        assert (result.found, result.kept) == ({"batch 1": 0.9}, {"batch 1": True})
        assert result.skipped.startswith("batch 256: ")
        assert one.failed == failed


def test_a_bare_graph_is_what_the_tax_is_of() -> None:
    step = engine.WorkerStep(3e-3, Parts(100, 0.0, 0.0), 2e-3)
    assert step.bare == 2e-3
    assert engine.WorkerStep(3e-3, Parts(100, 0.0, 0.0), None).bare == 3e-3


def test_a_session_without_a_number_does_not_end_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session.Session, "describe", lambda self: None)
    monkeypatch.setattr(session.Session, "_ceilings", lambda self, when: CEILINGS)
    monkeypatch.setattr(session.Session, "_measures", lambda self, ceilings: {"G3": lambda: ({"batch 1": 0.5}, {})})
    argv = ["--skip-checks", "--goals", "G3"]
    assert session.run([*argv, "--minutes", "0"], tmp_path) == 1
    assert session.run([*argv, "--minutes", "5"], tmp_path) == 0
