"""The files of checks/: kernels against their references, and kernels compiled for sm_90.

With a GPU the kernels run on it, otherwise in Triton's interpreter.

With another Triton, such as that of a GPU's torch: `pip install --target FOLDER --no-deps triton==3.6.0 "numpy<2.4"`,
then these tests with FOLDER in front of PYTHONPATH.
"""

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

CHECKS = Path(__file__).with_name("checks")
KERNELS = Path(__file__).resolve().parents[3] / "kernels"
COMPILED = sorted(CHECKS.glob("*_sm90.py"))
RUN = sorted(set(CHECKS.glob("*.py")) - set(COMPILED))

triton = pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
OLD = not ON_GPU and Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4")
"""Triton's interpreter up to 3.6 fails with newer numpy: loops over loaded bounds raise."""
pytestmark = pytest.mark.timeout(600)
QUICK, ALL = ("-m", "not slow"), ()

EACH = pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(path.name, marks=pytest.mark.skipif(OLD, reason="numpy is too new")) for path in RUN),
        *(path.name for path in COMPILED),
    ],
)


def run(files: list[Path], arguments: tuple[str, ...], *, interpret: bool, cache: Path) -> dict[str, dict]:
    """The result of each file, by name."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}  # as 3.6 has it without being asked
    environment.pop("TRITON_INTERPRET", None)
    if interpret and not ON_GPU:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Products are numpy's there, whose kernels for some processors compute a row by what lies beside it.
        environment["OPENBLAS_CORETYPE"] = "Prescott"
    command = [sys.executable, str(Path(__file__).with_name("forked.py")), *map(str, files), "--", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=3000)
    assert done.returncode == 0
    return {Path(found["file"]).name: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def quick_results(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Compiled kernels are kept for later runs: Triton finds them by source, options and version."""
    kept = getattr(pytestconfig, "cache", None)
    cache = tmp_path_factory.mktemp("triton") if kept is None else kept.mkdir("triton")
    return run(RUN, QUICK, interpret=True, cache=cache) | run(COMPILED, QUICK, interpret=False, cache=cache)


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    cache = tmp_path_factory.mktemp("triton")
    return run(RUN, ALL, interpret=True, cache=cache) | run(COMPILED, ALL, interpret=False, cache=cache)


def passed(found: dict) -> None:
    assert found["status"] == 0, f"{found['file']} ended with {found['status']}\n{found['output'][-6000:]}"


@EACH
def test_a_quick_check_passes_in_the_interpreter(name: str, quick_results: dict[str, dict]) -> None:
    passed(quick_results[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@EACH
def test_each_check_passes_in_the_interpreter(name: str, all_results: dict[str, dict]) -> None:
    passed(all_results[name])


def test_checks_are_found_without_our_plugins() -> None:
    """By the command that is written down for a machine with a GPU; its options are all that its pytest is told."""
    root = Path(__file__).resolve().parents[3]
    text = (root / "load_tests" / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    (line,) = (line for line in text.splitlines() if "-m pytest -c /dev/null" in line)
    variables = dict(variable.split("=", 1) for variable in line.partition("python3")[0].split())
    variables["PYTHONPATH"] = variables["PYTHONPATH"].removeprefix(".whl/site:")
    options = shlex.split(line.partition("python3")[2])
    assert options[-1] == "tests/kernels/triton/checks/*.py"
    files = [str(CHECKS / name) for name in ("cuda_runner.py", "small_operations.py")]  # the first has most imports
    command = [sys.executable, *options[:-1], "-p", "no:asyncio", "-p", "no:timeout", "--collect-only", *files]
    environment = os.environ | variables | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "small_operations.py::" in done.stdout


def kernels() -> set[str]:
    """Those of every operation, by module and name."""
    found = set()
    for path in KERNELS.rglob("triton_*.py"):
        module = ".".join(("troupellm.kernels", *path.relative_to(KERNELS).with_suffix("").parts))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(f"{module}.{node.name}")
    return found


def seen(files: list[Path], results: dict[str, dict]) -> set[str]:
    return {kernel for path in files for kernel in results[path.name]["kernels"]}


def test_quick_checks_compile_every_kernel(quick_results: dict[str, dict]) -> None:
    assert len(kernels()) > 25
    assert not kernels() - seen(COMPILED, quick_results)


@pytest.mark.skipif(ON_GPU or OLD, reason="the kernels are not interpreted")
def test_quick_checks_run_every_kernel(quick_results: dict[str, dict]) -> None:
    assert not kernels() - seen(RUN, quick_results)


@pytest.mark.skipif(ON_GPU or OLD, reason="the kernels are not interpreted")
def test_a_whole_model_goes_through_the_kernels(quick_results: dict[str, dict]) -> None:
    operations = {kernel.split(".")[2] for kernel in quick_results["cuda_runner.py"]["kernels"]}
    assert operations >= {
        "fused_moe",
        "paged_attention",
        "rms_norm",
        "rope_kv_write",
        "sampling",
        "gated_act",
        "decode_io",
    }
