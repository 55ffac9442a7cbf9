"""The file of the secret behind block names."""

import os
import threading
from pathlib import Path

import pytest

from troupellm.models.hub.secret import SECRET_BYTES, derived_key, prefix_hash_key, read_secret
from troupellm.protocol.errors import ConfigError


def test_the_secret_is_made_once_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    first = read_secret(path)
    assert len(first) == SECRET_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path) == first
    assert os.listdir(path.parent) == ["secret"]
    assert read_secret(tmp_path / "another") != first


def test_threads_that_make_the_secret_at_the_same_time_agree(tmp_path: Path) -> None:
    begin, found = threading.Barrier(8), []

    def make() -> None:
        begin.wait()
        found.append(read_secret(tmp_path / "secret"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("content", [b"", b"zz" * 32, b"ab" * 31, b"ab" * 33, b"\xff" * 64, b"ab" * 5000])
def test_anything_else_in_it_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="hexadecimal") as raised:
        read_secret(path)
    assert raised.value.param == "prefix_hash_secret_file"
    assert str(tmp_path) not in raised.value.message


@pytest.mark.parametrize("mode", [0o622, 0o620, 0o604, 0o602, 0o601])
def test_one_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    read_secret(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(path)


def test_one_that_another_user_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    read_secret(path)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(ConfigError, match="another user"):
        read_secret(path)


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read or made"):
        read_secret(tmp_path)


def test_purposes_and_models_have_keys_of_their_own() -> None:
    secret = bytes(SECRET_BYTES)
    keys = [derived_key(secret, "blocks"), derived_key(secret, "peer"), prefix_hash_key(secret, "a")]
    keys += [prefix_hash_key(secret, "b"), derived_key(b"\1" * SECRET_BYTES, "blocks")]
    assert len(set(keys)) == len(keys)
