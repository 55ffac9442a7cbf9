"""The library of compiled code: what it needs, what happens without it, and whose threads it uses."""

import contextlib
import os
import platform
import select
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from troupellm.kernels import cpp
from troupellm.kernels.cpp import build
from troupellm.kernels.linear import linear, pack
from troupellm.models.load.notes import report_compiling
from troupellm.tests.support.engines.inside import compiler_path

COMPILER = compiler_path()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no compiler, or TROUPE_NATIVE=0")


@needs_compiler
def test_where_there_is_a_compiler_there_is_a_library() -> None:
    """Tests of what is in it are skipped without it, and would not say so."""
    assert cpp.load() is not None


@needs_compiler
@pytest.mark.parametrize("stage", ["compile", "link"])
def test_a_broken_compiler_says_why_and_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    compiler = tmp_path / "g++"
    broken = '[ "$1" = -shared ] || exit 0\n' if stage == "link" else ""
    compiler.write_text(f"#!/bin/sh\n{broken}echo out of luck >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda name: str(compiler))
    monkeypatch.setattr(build, "folders", lambda: (tmp_path / "first", tmp_path / "second"))
    monkeypatch.delenv(build.SWITCH, raising=False)
    for _ in range(2):
        assert cpp.load.__wrapped__() is None
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["out of luck"]
    for folder in ("first", "second"):
        assert {file.suffix for file in (tmp_path / folder).iterdir()} == {".lock", ".slow"}


def test_a_slow_compiler_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One deadline for all sources, no second folder, and nothing for the next process."""
    compiler, calls = tmp_path / "g++", tmp_path / "calls"
    compiler.write_text(f"#!/bin/sh\necho >> {calls}\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda name: str(compiler))
    monkeypatch.setattr(build, "folders", lambda: (tmp_path / "first", tmp_path / "second"))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 1.0)
    monkeypatch.delenv(build.SWITCH, raising=False)
    notes = []
    report_compiling(notes.append, on_cpu=True)
    assert [note.detail for note in notes] == ["compiling the CPU's kernels, once on this machine"]
    assert cpp.load.__wrapped__() is None
    count = len(calls.read_text()) if calls.exists() else 0
    assert not (tmp_path / "second").exists()
    assert {file.suffix for file in (tmp_path / "first").iterdir()} == {".lock", ".slow"}
    report_compiling(notes.append, on_cpu=True)
    assert len(notes) == 1
    assert cpp.load.__wrapped__() is None
    assert (len(calls.read_text()) if calls.exists() else 0) == count
    monkeypatch.setattr(build, "RETRY_SECONDS", 0.0)
    assert build.to_be_built()


def test_a_build_that_fails_ends_the_processes_that_its_other_compilers_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, child, started = tmp_path / "g++", tmp_path / "child", tmp_path / "started"
    os.mkfifo(started)
    fails = f"read line < {started}; exit 1"
    compiles = f"sleep 600 & echo $! > {child}; echo > {started}; wait"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *first.cpp*) {fails};; *) {compiles};; esac\n')
    compiler.chmod(0o755)
    sources = tmp_path / "source"
    sources.mkdir()
    for name in ("first.cpp", "second.cpp"):
        (sources / name).touch()
    monkeypatch.setattr(build.shutil, "which", lambda name: str(compiler))
    monkeypatch.setattr(build, "folders", lambda: (tmp_path / "cache",))
    monkeypatch.setattr(build, "FOLDER", sources)
    monkeypatch.delenv(build.SWITCH, raising=False)
    assert cpp.load.__wrapped__() is None
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(int(child.read_text()))
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(30_000), "the compiler's child lives on"
        os.close(descriptor)


def test_without_a_compiler_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert cpp.load.__wrapped__() is None


@pytest.mark.slow
@needs_compiler
def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(build, "FLAGS", ("-O0", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-Wno-psabi"))
    monkeypatch.setattr(build, "folders", lambda: (blocked / "below", tmp_path / "cache"))
    assert cpp.load.__wrapped__() is not None
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".so"]


def test_a_folder_that_nobody_may_look_into_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's HOME is often root's, for every user. A name that is too long fails for every user alike."""
    monkeypatch.setattr(build.shutil, "which", lambda name: str(tmp_path / "g++"))
    monkeypatch.setattr(build, "folders", lambda: (tmp_path / ("x" * 300),))
    monkeypatch.delenv(build.SWITCH, raising=False)
    assert build.to_be_built()
    assert cpp.load.__wrapped__() is None


def small_source(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """Build this instead; gives a file with a line for every call of the compiler."""
    (folder / "source").mkdir()
    (folder / "source" / "small.cpp").write_text(text)
    compiler, calls = folder / "g++", folder / "calls"
    calls.touch()
    compiler.write_text(f'#!/bin/sh\necho >> {calls}\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", lambda name: str(compiler))
    monkeypatch.setattr(build, "FOLDER", folder / "source")
    monkeypatch.setattr(build, "FLAGS", ("-O0", "-fPIC"))
    monkeypatch.setattr(build, "folders", lambda: (folder / "cache",))
    return calls


@needs_compiler
def test_builds_that_are_asked_for_together_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = small_source(tmp_path, monkeypatch, 'extern "C" void nothing() {}\n')
    with ThreadPoolExecutor(3) as threads:
        found = [future.result() for future in [threads.submit(build.library) for _ in range(3)]]
    assert len({path for path, _ in filter(None, found)}) == 1
    assert sorted(built for _, built in filter(None, found)) == [False, False, True]
    assert len(calls.read_text().splitlines()) == 2  # compile and link


def of_another_machine(data: bytes) -> bytes:
    """With a number in its header that no processor has."""
    return data[:18] + b"\xee\xee" + data[20:]


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="what is damaged here are files of Linux")
@pytest.mark.parametrize(
    ("damage", "warnings"),
    [(lambda data: data[: len(data) // 2], 0), (lambda data: b"", 0), (of_another_machine, 1)],
    ids=["half", "nothing", "of another machine"],
)
def test_a_library_that_cannot_be_loaded_is_built_anew(
    damage: Callable[[bytes], bytes],
    warnings: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = small_source(tmp_path, monkeypatch, 'extern "C" void nothing() {}\n')
    found = build.library()
    assert found is not None
    path, built = found
    assert built
    whole = path.read_bytes()
    once = len(calls.read_text())
    path.write_bytes(damage(whole))
    assert build.to_be_built() is (warnings == 0)
    library = cpp.load.__wrapped__()
    assert library is not None
    library.function("nothing", "")()
    assert len(calls.read_text()) == 2 * once
    assert build.library() == (path, False)
    assert len(path.read_bytes()) == len(whole)
    assert len(caplog.records) == warnings


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere linkers refuse it")
def test_a_library_that_cannot_be_loaded_however_often_it_is_built_is_given_up_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = 'extern "C" void nowhere_defined();\nextern "C" void nothing() { nowhere_defined(); }\n'
    calls = small_source(tmp_path, monkeypatch, text)
    assert cpp.load.__wrapped__() is None
    assert "torch computes instead" in caplog.text
    assert "nowhere_defined" in caplog.text
    once = len(calls.read_text())
    assert once
    caplog.clear()
    assert cpp.load.__wrapped__() is None  # as in the next process
    assert len(calls.read_text()) == once
    assert "torch computes instead" in caplog.text


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the processors are x86-64")
@pytest.mark.parametrize("options", ["-march=x86-64", "-march=haswell -mno-fma", "-march=skylake-avx512"])
@pytest.mark.parametrize("name", ["int8_linear", "low_rank"])
def test_products_compile_for_other_processors(name: str, options: str, tmp_path: Path) -> None:
    """One error leaves the machine without any compiled code."""
    flags = [flag for flag in build.FLAGS if not flag.startswith(("-march", "-O"))]
    source, target = build.FOLDER / f"{name}.cpp", tmp_path / "made.o"
    command = [str(COMPILER), *flags, *options.split(), "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which files a process has mapped")
def test_threads_are_those_of_torch() -> None:
    """Two OpenMP libraries would be two pools, each spinning while the other works."""
    code = (
        "from troupellm.kernels import cpp as native\n"
        "from troupellm.kernels.cpp import build\n"
        "assert native.load() is not None\n"
        "print(len(build.loaded_openmp()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@needs_compiler
def test_profiles_show_what_it_does() -> None:
    packed = pack(torch.randn(64, 32))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        linear(torch.randn(2, 32), packed)
    assert "native::linear" in {event.key for event in profile.key_averages()}
