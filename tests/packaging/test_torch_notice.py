"""What is said before gigabytes are downloaded, and when nothing is."""

import importlib.util
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "torch_notice.py"
CPU = "https://index.invalid/torch-2.13.0%2Bcpu-cp311.whl"
CUDA = "https://index.invalid/torch-2.13.0-cp311.whl"


@pytest.fixture
def notice() -> Any:
    spec = importlib.util.spec_from_file_location("torch_notice", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(monkeypatch: pytest.MonkeyPatch, notice: Any, *urls: str, gpu: bool = False) -> None:
    """What pip and the machine say."""
    report = json.dumps({"install": [{"download_info": {"url": url}} for url in urls]})
    done = SimpleNamespace(returncode=0, stdout=report, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(notice.shutil, "which", lambda _: "/bin/nvidia-smi" if gpu else None)
    monkeypatch.delenv("ALLOW_CUDA", raising=False)


@pytest.mark.parametrize(
    ("urls", "gpu", "code", "said"),
    [
        ((), False, 0, "torch is installed"),
        (("file:///wheels/torch-2.13.0.whl",), False, 0, "a wheel on this machine"),
        ((CPU,), False, 0, "about 250 MB to download"),
        ((CUDA,), True, 0, "about 3 GB to download"),
        ((CUDA,), False, 1, "TORCH_INDEX=<address>"),
    ],
)
def test_the_size_is_said_and_cuda_for_no_gpu_is_not_fetched(
    notice: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    urls: tuple[str, ...],
    gpu: bool,
    code: int,
    said: str,
) -> None:
    answer(monkeypatch, notice, *urls, gpu=gpu)
    assert notice.main("constraints-cpu.txt") == code
    assert said in capsys.readouterr().out


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
