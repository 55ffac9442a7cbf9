"""The files of checks/: kernels against their references in Triton's interpreter, and kernels compiled for sm_90."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("checks")
COMPILED = sorted(CHECKS.glob("*_sm90.py"))
INTERPRETED = sorted(set(CHECKS.glob("*.py")) - set(COMPILED))

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(600)
QUICK, ALL = ("-m", "not slow"), ()


def run(files: list[Path], arguments: tuple[str, ...], *, interpret: bool, cache: Path) -> dict[str, dict]:
    """What became of each file, by name."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}  # as 3.6 has it without being asked
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(Path(__file__).with_name("forked.py")), *map(str, files), "--", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=1500)
    assert done.returncode == 0
    return {Path(found["file"]).name: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    cache = tmp_path_factory.mktemp("triton")
    return run(INTERPRETED, QUICK, interpret=True, cache=cache) | run(COMPILED, QUICK, interpret=False, cache=cache)


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    cache = tmp_path_factory.mktemp("triton")
    return run(INTERPRETED, ALL, interpret=True, cache=cache) | run(COMPILED, ALL, interpret=False, cache=cache)


def passed(found: dict) -> None:
    # 5: nothing collected, as where all of a file is slow
    assert found["status"] in (0, 5), f"{found['file']} ended with {found['status']}\n{found['output'][-6000:]}"


@pytest.mark.parametrize("name", [path.name for path in (*INTERPRETED, *COMPILED)])
def test_quick_checks(name: str, quick_results: dict[str, dict]) -> None:
    passed(quick_results[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [path.name for path in (*INTERPRETED, *COMPILED)])
def test_all_checks(name: str, all_results: dict[str, dict]) -> None:
    passed(all_results[name])
    assert all_results[name]["status"] == 0, "a file of checks without checks"
