"""The files of checks/: kernels against their references, and kernels compiled for sm_90.

With a GPU the kernels run on it, otherwise in Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

CHECKS = Path(__file__).with_name("checks")
COMPILED = sorted(CHECKS.glob("*_sm90.py"))
RUN = sorted(set(CHECKS.glob("*.py")) - set(COMPILED))
WHOLLY_SLOW = {"attention_in_a_model.py", "cuda_runner.py", "grouped_linear_sm90.py"}
"""Without a quick check, which is tested below: what they import takes seconds by itself."""

triton = pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
OLD = not ON_GPU and Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4")
"""Triton's interpreter up to 3.6 fails with newer numpy: loops over loaded bounds raise."""
pytestmark = pytest.mark.timeout(600)
QUICK, ALL = ("-m", "not slow"), ()


def quick(files: list[Path]) -> list[Path]:
    return [path for path in files if path.name not in WHOLLY_SLOW]


def left_out(files: list[Path]) -> list[Path]:
    return [path for path in files if path.name in WHOLLY_SLOW]


def each(run: list[Path], compiled: list[Path]) -> pytest.MarkDecorator:
    too_new = pytest.mark.skipif(OLD, reason="numpy is too new")
    names = [*(pytest.param(path.name, marks=too_new) for path in run), *(path.name for path in compiled)]
    return pytest.mark.parametrize("name", names)


def run(files: list[Path], arguments: tuple[str, ...], *, interpret: bool, cache: Path) -> dict[str, dict]:
    """What became of each file, by name."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}  # as 3.6 has it without being asked
    environment.pop("TRITON_INTERPRET", None)
    if interpret and not ON_GPU:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).with_name("forked.py")), *map(str, files), "--", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=3000)
    assert done.returncode == 0
    return {Path(found["file"]).name: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    cache = tmp_path_factory.mktemp("triton")
    found = run(quick(RUN), QUICK, interpret=True, cache=cache)
    return found | run(quick(COMPILED), QUICK, interpret=False, cache=cache)


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    cache = tmp_path_factory.mktemp("triton")
    return run(RUN, ALL, interpret=True, cache=cache) | run(COMPILED, ALL, interpret=False, cache=cache)


def passed(found: dict) -> None:
    """Status 5 is a file that has nothing to run: one of `WHOLLY_SLOW`, when slow checks are not wanted."""
    assert found["status"] == 0, f"{found['file']} ended with {found['status']}\n{found['output'][-6000:]}"


@each(quick(RUN), quick(COMPILED))
def test_quick_checks(name: str, quick_results: dict[str, dict]) -> None:
    passed(quick_results[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each(RUN, COMPILED)
def test_all_checks(name: str, all_results: dict[str, dict]) -> None:
    passed(all_results[name])


@pytest.mark.slow
def test_files_that_the_quick_checks_leave_out_have_none(tmp_path: Path) -> None:
    found = run(left_out(RUN), QUICK, interpret=True, cache=tmp_path)
    found |= run(left_out(COMPILED), QUICK, interpret=False, cache=tmp_path)
    assert set(found) == WHOLLY_SLOW
    for name, each_found in found.items():
        assert each_found["status"] == pytest.ExitCode.NO_TESTS_COLLECTED, f"{name}\n{each_found['output'][-6000:]}"
