"""The notice before gigabytes are downloaded, and the cases without one."""

import importlib.util
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "torch_notice.py"
INDEX = "https://index.invalid/whl/"
PLAIN = ("filelock", "sympy>=1.13.3", 'optree>=0.13.0; extra == "optree"')
CUDA_12 = (*PLAIN, 'nvidia-cudnn-cu12==9.10.2; platform_system == "Linux" and platform_machine == "x86_64"')
CUDA_13 = (*PLAIN, 'cuda-bindings<14,>=13.0.3; platform_system == "Linux"', 'nvidia-nccl-cu13; sys_platform == "linux"')
LINUX = {"platform_system": "Linux", "platform_machine": "x86_64", "sys_platform": "linux"}
ARM = {**LINUX, "platform_machine": "aarch64"}
MACOS = {"platform_system": "Darwin", "platform_machine": "arm64", "sys_platform": "darwin"}


@pytest.fixture
def notice() -> Any:
    spec = importlib.util.spec_from_file_location("torch_notice", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(file: str, requires: Sequence[str] = (), *, index: str = INDEX) -> dict[str, Any]:
    """An entry of pip's report."""
    return {"download_info": {"url": f"{index}{file}"}, "metadata": {"name": "torch", "requires_dist": list(requires)}}


def answer(
    monkeypatch: pytest.MonkeyPatch,
    notice: Any,
    *installs: dict[str, Any],
    machine: Mapping[str, str] = LINUX,
    gpu: bool = False,
) -> None:
    """Set the answers of pip and of the machine."""
    report = json.dumps({"install": installs, "environment": machine})
    done = SimpleNamespace(returncode=0, stdout=report, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(notice.shutil, "which", lambda _: "/bin/nvidia-smi" if gpu else None)
    monkeypatch.delenv("ALLOW_CUDA", raising=False)


CPU = wheel("torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl", PLAIN)
CUDA = wheel("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", CUDA_12)


@pytest.mark.parametrize(
    ("installs", "gpu", "code", "said"),
    [
        ((), False, 0, "torch is installed"),
        ((wheel("torch-2.13.0.whl", CUDA_12, index="file:///wheels/"),), False, 0, "a wheel on this machine"),
        ((CPU,), False, 0, "about 250 MB to download"),
        ((CUDA,), True, 0, "about 3 GB to download"),
        ((CUDA,), False, 1, "TORCH_INDEX=<address>"),
    ],
)
def test_the_size_is_said_and_cuda_for_no_gpu_is_not_fetched(
    notice: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installs: tuple[dict[str, Any], ...],
    gpu: bool,
    code: int,
    said: str,
) -> None:
    answer(monkeypatch, notice, *installs, gpu=gpu)
    assert notice.main("constraints-cpu.txt") == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "requires", "machine", "code"),
    [
        ("torch-2.13.0-cp311-none-macosx_11_0_arm64.whl", PLAIN, MACOS, 0),
        ("torch-2.13.0-cp311-none-macosx_11_0_arm64.whl", CUDA_12, MACOS, 0),
        ("torch-2.13.0-cp311-none-macosx_11_0_arm64.whl", CUDA_13, MACOS, 0),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_aarch64.whl", PLAIN, ARM, 0),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_aarch64.whl", CUDA_12, ARM, 0),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_aarch64.whl", CUDA_13, ARM, 1),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", PLAIN, LINUX, 0),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", CUDA_13, LINUX, 1),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", ("nvidia-cublas",), LINUX, 1),
        ("torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", ('nvidia-cublas; extra == "cuda"',), LINUX, 0),
        ("torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl", CUDA_13, LINUX, 0),
        ("torch-2.13.0+cu130-cp311-cp311-manylinux_2_28_x86_64.whl", PLAIN, LINUX, 1),
        ("torch-2.13.0%2Bcu130-cp311-cp311-manylinux_2_28_x86_64.whl", PLAIN, LINUX, 1),
    ],
)
def test_a_cuda_wheel_is_known_by_its_requirements_on_this_machine(
    notice: Any,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    requires: Sequence[str],
    machine: Mapping[str, str],
    code: int,
) -> None:
    """Once every name without `cpu` in it was refused, and with it macOS and plainly named wheels of other indexes."""
    answer(monkeypatch, notice, wheel(file, requires), machine=machine)
    assert notice.main("constraints-cpu.txt") == code


def test_a_wheel_that_tells_nothing_of_what_it_needs_is_for_a_cpu(
    notice: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install = wheel("torch-2.13.0-cp311-none-macosx_11_0_arm64.whl")
    del install["metadata"]["requires_dist"]
    answer(monkeypatch, notice, install, machine=MACOS)
    assert notice.main("constraints-cpu.txt") == 0
    assert "about 250 MB" in capsys.readouterr().out


def test_cuda_is_fetched_for_no_gpu_where_it_is_wanted(notice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, notice, CUDA)
    monkeypatch.setenv("ALLOW_CUDA", "1")
    assert notice.main("constraints-cpu.txt") == 0


def test_an_index_without_torch_says_what_to_set(
    notice: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = SimpleNamespace(returncode=1, stdout="", stderr="no matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert notice.main("constraints-cpu.txt") == 1
    error = capsys.readouterr().err
    assert "set TORCH_INDEX" in error
    assert "no matching distribution" in error
