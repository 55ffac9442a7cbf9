"""The fingerprint separates models and settings whose KV blocks must not meet."""

import json
import os
from pathlib import Path

import pytest

from troupellm.models.load import fingerprint
from troupellm.models.load.fingerprint import SameModel, files_digest
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError, WeightsChanged
from troupellm.protocol.messages.sleep import EMPTY, SleepWorker, WakeWorker
from troupellm.protocol.messages.worker import WorkerReady
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.inside import fingerprint_of


def loaded(folder: Path, secret: Path | None, **settings: object) -> ModelWorker:
    return load(ModelWorker(folder), secret, **settings)[0]


def load(worker: ModelWorker, secret: Path | None, **settings: object) -> tuple[ModelWorker, WorkerReady]:
    given = {} if secret is None else {"prefix_hash_secret_file": str(secret)}
    config = EngineConfig.from_flat(
        {"device": "cpu", "num_gpu_blocks_override": 8, "max_model_len": 64} | given | settings
    )
    return worker, worker.load(config, lambda progress: None)


def succeed(folder: Path, secret: Path | None, first: WorkerReady) -> None:
    """Load the worker that follows another one."""
    worker = ModelWorker(folder)
    worker.expect_weights(first)
    try:
        load(worker, secret)
    finally:
        worker.close()


def told(folder: Path, secret: Path | None, **settings: object) -> str:
    worker = loaded(folder, secret, **settings)
    try:
        return fingerprint_of(worker)
    finally:
        worker.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def test_the_same_model_anywhere_has_the_same_one(folder: Path, tmp_path: Path) -> None:
    copy = write_tiny_model(tmp_path / "copy")
    assert told(folder, tmp_path / "secret") == told(copy, tmp_path / "another secret") != ""


def test_weights_are_not_digested_where_no_blocks_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "files_digest", lambda files: pytest.fail("weights were digested"))
    assert told(folder, None) == ""


def test_weights_config_and_settings_count(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    another = write_tiny_model(tmp_path / "another", seed=1)
    edited = write_tiny_model(tmp_path / "edited")
    config = json.loads((edited / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    found = [
        told(folder, secret),
        told(another, secret),
        told(edited, secret),
        told(folder, secret, block_size=8),
        told(folder, secret, dtype="bfloat16"),
        told(folder, secret, kv_cache_dtype="int8"),
        told(folder, secret, quantization="int8"),
        told(folder, secret, load_format="dummy"),
        told(folder, secret, load_format="dummy", seed=1),
        told(folder, secret, batch_invariant=True),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "default"])
def test_the_served_length_counts_where_keys_are_rotated_by_it(tmp_path: Path, kind: str) -> None:
    folder, secret = write_tiny_model(tmp_path / "model"), tmp_path / "secret"
    config = json.loads((folder / "config.json").read_text())
    size = config["head_dim"]
    scaling: dict[str, object] | None = None if kind == "default" else {"rope_type": kind, "factor": 4.0}
    if scaling is not None and kind == "longrope":
        scaling |= {"short_factor": [1.0] * (size // 2), "long_factor": [4.0] * (size // 2)}
        scaling |= {"original_max_position_embeddings": 128}
    config |= {"max_position_embeddings": 256 if kind == "longrope" else 128, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    short, long = 128, 512 if kind == "dynamic" else 256 if kind == "longrope" else 64
    found = {told(folder, secret, max_model_len=length, num_gpu_blocks_override=40) for length in (short, long)}
    assert len(found) == (1 if kind == "default" else 2)
    assert "" not in found


def test_weights_that_changed_in_its_sleep_do_not_wake(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    worker = loaded(folder, tmp_path / "secret")
    worker.command(SleepWorker(level=EMPTY), lambda progress: None)
    write_tiny_model(folder, seed=1)
    with pytest.raises(ModelLoadError, match="others than"):
        worker.command(WakeWorker(weights=True, kv_cache=True), lambda progress: None)
    write_tiny_model(folder)
    assert worker.command(WakeWorker(weights=True, kv_cache=True), lambda progress: None).ready is not None
    worker.close()


def test_weights_that_changed_in_its_sleep_do_not_wake_without_a_fingerprint_either(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    worker = loaded(folder, None)
    worker.command(SleepWorker(level=EMPTY), lambda progress: None)
    write_tiny_model(folder, seed=1)
    with pytest.raises(WeightsChanged, match="model.safetensors has changed"):
        worker.command(WakeWorker(weights=True, kv_cache=True), lambda progress: None)
    worker.close()


@pytest.mark.parametrize("kept", [False, True])
def test_a_successor_refuses_other_weights_than_its_predecessor_had(tmp_path: Path, kept: bool) -> None:
    """kept: blocks outlive the engine, so that the content counts, and not the time of the files."""
    folder, secret = write_tiny_model(tmp_path / "model"), tmp_path / "secret" if kept else None
    worker, first = load(ModelWorker(folder), secret)
    worker.close()
    succeed(folder, secret, first)
    write_tiny_model(folder, seed=1)
    with pytest.raises(WeightsChanged, match="others than" if kept else "model.safetensors has changed"):
        succeed(folder, secret, first)
    if kept:
        write_tiny_model(folder)
        succeed(folder, secret, first)


def test_every_byte_of_every_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "PART_BYTES", 8)
    first, second = tmp_path / "a", tmp_path / "b"
    content = bytes(range(20))
    first.write_bytes(content)
    second.write_bytes(b"rest")
    seen = {files_digest([first, second]), files_digest([second, first]), files_digest([first])}
    for place in range(len(content)):
        first.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        seen.add(files_digest([first, second]))
    first.write_bytes(content[:16])
    second.write_bytes(content[16:] + b"rest")
    seen.add(files_digest([first, second]))
    assert len(seen) == 3 + len(content) + 1


def test_weights_that_are_gone_are_a_load_error() -> None:
    def compute() -> str:
        raise FileNotFoundError(2, os.strerror(2))

    with pytest.raises(ModelLoadError, match="cannot be read"):
        SameModel(compute, tuple).check()
