"""Files that change while a model is read from them, and what is said of those that cannot be read."""

import os
from pathlib import Path

import pytest

from troupellm.models.hub.errors import load_failure, why
from troupellm.models.hub.steady_files import SteadyFiles
from troupellm.models.worker.main import failed
from troupellm.protocol.errors import ModelLoadError

DENIED = PermissionError(13, "Permission denied", "/home/somebody/model/config.json")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"weights")
    return path


def test_what_stays_as_it_is_is_fine(file: Path) -> None:
    steady = SteadyFiles([file])
    file.read_bytes()
    steady.check()
    steady.check(file)


def test_what_is_not_there_at_first_is_the_readers_business(file: Path) -> None:
    missing = file.with_name("b.safetensors")
    steady = SteadyFiles([file, missing])
    missing.write_bytes(b"late")
    steady.check()
    steady.check(missing)


def test_a_longer_file_has_changed(file: Path) -> None:
    steady, state = SteadyFiles([file]), file.stat()
    file.write_bytes(b"weights and more")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(
        ModelLoadError, match=r"(?m)^a\.safetensors has changed from 7 to 16 bytes while the model was read from it$"
    ):
        steady.check()


def test_a_file_of_the_same_size_has_changed(file: Path) -> None:
    steady, state = SteadyFiles([file]), file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    with pytest.raises(ModelLoadError, match="has changed"):
        steady.check(file)


def test_a_file_that_is_not_there_any_more_has_gone(file: Path) -> None:
    steady = SteadyFiles([file])
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"(?m)^a\.safetensors has gone while the model was read from it$"):
        steady.check()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DENIED, "Permission denied"),
        (FileNotFoundError("No such file or directory: /home/somebody/model"), "No such file or directory"),
        (OSError("something of /home/somebody"), "it cannot be read"),
        (ValueError("no number"), "no number"),
        (ValueError(), "ValueError"),
    ],
)
def test_reasons_have_no_path(error: Exception, reason: str) -> None:
    assert why(error) == reason


def test_a_failure_that_nobody_foresaw_names_the_file_if_there_is_one() -> None:
    assert load_failure(DENIED).message == "config.json: Permission denied"
    assert load_failure(KeyError("x")).message == "the model could not be loaded: 'x'"
    assert load_failure(ValueError()).message == "the model could not be loaded: ValueError"


def test_a_worker_process_says_the_same() -> None:
    said = failed(DENIED, loading=True)
    assert (said.kind, said.message) == ("ModelLoadError", "config.json: Permission denied")
    assert failed(ValueError("x"), loading=False).kind == "ValueError"
