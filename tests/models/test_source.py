import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from troupellm.models.source import BUILTIN_FOLDER, resolve_model, served_names
from troupellm.protocol.config import ModelConfig
from troupellm.protocol.errors import ModelLoadError

REPO = "someone/tiny-model"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
WEIGHTS = bytes(range(256)) * 400


class FakeHub:
    """Enough of the hub's interface for one public and one private repository, on loopback."""

    def __init__(self) -> None:
        self.files = {
            "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": b'{"version": "1.0"}',
            "tokenizer_config.json": b"{}",
            "model.safetensors": WEIGHTS,
            "pytorch_model.bin": b"never fetched",
            "modeling_custom.py": b"never fetched",
            "README.md": b"never fetched",
            "onnx/config.json": b"never fetched",
        }
        self.requests: list[tuple[str, str, str | None]] = []
        self.tokens: set[str | None] = set()
        self.etags: dict[str, str] = {}
        self.status: int | None = None
        self.cut_after: int | None = None
        """Once: break the connection after so many bytes of the weights."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """A client that hangs up is part of the tests."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlparse(handler.path).path)
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        self.tokens.add(handler.headers.get("Authorization"))
        if self.status is not None:
            return self._send(handler, self.status, {}, b"", body)
        if path.startswith(f"/api/models/{REPO}"):
            revision = path.partition("/revision/")[2] or "main"
            commit = self._commit(revision)
            if commit is None:
                return self._send(handler, 404, {"X-Error-Code": "RevisionNotFound"}, b"", body)
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            info = {"id": REPO, "modelId": REPO, "sha": commit, "siblings": siblings, "private": False, "tags": []}
            return self._send(handler, 200, {"Content-Type": "application/json"}, json.dumps(info).encode(), body)
        prefix = f"/{REPO}/resolve/"
        if path.startswith(prefix):
            revision, _, name = path.removeprefix(prefix).partition("/")
            commit = self._commit(revision)
            if commit is not None and name in self.files:
                return self._send_file(handler, name, commit, body)
            return self._send(handler, 404, {"X-Error-Code": "EntryNotFound"}, b"", body)
        gated = path.startswith("/api/models/someone/gated")
        code = "GatedRepo" if gated else "RepoNotFound"
        return self._send(handler, 403 if gated else 401, {"X-Error-Code": code}, b"", body)

    def _commit(self, revision: str) -> str | None:
        return revision if revision in COMMITS.values() else COMMITS.get(revision)

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str, commit: str, body: bool) -> None:
        data = self.files[name]
        etag = self.etags.get(name) or hashlib.sha1(data, usedforsecurity=False).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = handler.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if body and name == "model.safetensors" and self.cut_after is not None:
            cut, self.cut_after = self.cut_after, None
            handler.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                handler.send_header(key, value)
            handler.end_headers()
            handler.wfile.write(data[:cut])
            handler.close_connection = True
            return
        self._send(handler, 206 if start else 200, headers, data[start:], body)

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes, body: bool
    ) -> None:
        handler.send_response(status)
        for key, value in headers.items():
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if body:
            handler.wfile.write(data)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    fake = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    yield fake
    fake.close()


def config(tmp_path: Path, model: str = REPO, **changes) -> ModelConfig:
    return ModelConfig(model=model, download_dir=str(tmp_path / "cache"), **changes)


def quiet(progress) -> None:
    pass


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_download_fetches_data_and_no_code(hub, tmp_path):
    seen = []
    folder = resolve_model(config(tmp_path), seen.append)
    assert names(folder) == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert folder.is_relative_to(tmp_path / "cache")
    assert [seen[0].phase, seen[1].phase] == ["resolve", "download"]
    done = [one.done for one in seen[1:]]
    assert done == sorted(done)
    assert seen[-1].done == seen[-1].total == sum(path.stat().st_size for path in folder.iterdir())


def test_what_says_how_a_vector_is_made_is_fetched(hub, tmp_path):
    hub.files |= {
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Dense/model.safetensors": b"never fetched",
        "evil/1_Pooling/config.json": b"never fetched",
    }
    folder = resolve_model(config(tmp_path), quiet)
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"{}"
    assert names(folder) >= {"modules.json", "1_Pooling"}
    assert not names(folder) & {"2_Dense", "evil"}


def test_a_second_start_downloads_nothing(hub, tmp_path):
    first = resolve_model(config(tmp_path), quiet)
    hub.requests.clear()
    assert resolve_model(config(tmp_path), quiet) == first
    assert not [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_token_is_sent(hub, tmp_path):
    resolve_model(config(tmp_path, hf_token="hf_secret"), quiet)
    assert hub.tokens == {"Bearer hf_secret"}


def test_a_revision_is_followed(hub, tmp_path):
    assert resolve_model(config(tmp_path, revision="v1"), quiet).name == COMMITS["v1"]
    assert resolve_model(config(tmp_path), quiet).name == COMMITS["main"]
    with pytest.raises(ModelLoadError, match="no revision v9"):
        resolve_model(config(tmp_path, revision="v9"), quiet)


def test_sharded_weights_are_those_of_the_index(hub, tmp_path):
    del hub.files["model.safetensors"]
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    for name in (*index["weight_map"].values(), "consolidated.safetensors", "extra.safetensors"):
        hub.files[name] = b"x" * 10
    folder = resolve_model(config(tmp_path), quiet)
    assert set(index["weight_map"].values()) <= names(folder)
    assert not {"consolidated.safetensors", "extra.safetensors"} & names(folder)
    del hub.files["model-00002-of-00002.safetensors"]
    with pytest.raises(ModelLoadError, match="names model-00002"):
        resolve_model(ModelConfig(model=REPO, download_dir=str(tmp_path / "other")), quiet)


def test_a_benchmark_with_dummy_weights_fetches_none(hub, tmp_path):
    assert "model.safetensors" not in names(resolve_model(config(tmp_path, load_format="dummy"), quiet))


def test_a_broken_download_goes_on_where_it_stopped(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cut_after = 50_000
    folder = resolve_model(config(tmp_path), quiet)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [wanted for method, path, wanted in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert ranges[0] is None
    assert ranges[1] is not None
    assert 0 < int(ranges[1].removeprefix("bytes=").partition("-")[0]) <= 50_000


@pytest.mark.parametrize(("content", "damaged"), [(b"something else", True), (b"x" * (len(WEIGHTS) + 1), False)])
def test_a_partial_file_with_other_content_is_thrown_away(hub, tmp_path, content, damaged):
    etag = hub.etags["model.safetensors"] = hashlib.sha256(WEIGHTS).hexdigest()
    partial = tmp_path / "cache" / f"models--{REPO.replace('/', '--')}" / "blobs" / f"{etag}.partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(content)
    if damaged:
        with pytest.raises(ModelLoadError, match="damaged"):
            resolve_model(config(tmp_path), quiet)
    assert (resolve_model(config(tmp_path), quiet) / "model.safetensors").read_bytes() == WEIGHTS


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_partial_file_of_an_earlier_run_is_resumed(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)

    def kill(progress) -> None:
        if progress.detail == "model.safetensors" and progress.done > 50_000:
            raise Killed

    with pytest.raises(Killed):
        resolve_model(config(tmp_path), kill)
    hub.requests.clear()
    seen = []
    folder = resolve_model(config(tmp_path), seen.append)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    (wanted,) = [r for method, path, r in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert wanted is not None
    start = int(wanted.removeprefix("bytes=").partition("-")[0])
    assert 0 < start < len(WEIGHTS)
    first = next(one for one in seen if one.detail == "model.safetensors")
    assert first.done > start  # what was there counts


def test_offline_takes_what_was_downloaded(hub, tmp_path, monkeypatch):
    online = resolve_model(config(tmp_path), quiet)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model(config(tmp_path), quiet) == online
    assert hub.requests == []


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_without_the_model_names_file_and_folder(hub, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(config(tmp_path), quiet)
    assert "config.json" in caught.value.message
    assert str(tmp_path / "cache") in caught.value.message


@pytest.mark.parametrize("gone", ["model.safetensors", "tokenizer.json"])
def test_offline_with_an_incomplete_model_names_what_is_missing(hub, tmp_path, monkeypatch, gone):
    folder = resolve_model(config(tmp_path), quiet)
    (folder / gone).unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match=gone):
        resolve_model(config(tmp_path), quiet)


@pytest.mark.parametrize("text", [b"{", b'{"weight_map": {"\xff": "a"}}', b'{"metadata": ' + b"[" * 100_000])
def test_offline_with_a_damaged_index_names_it(hub, tmp_path, monkeypatch, text):
    folder = resolve_model(config(tmp_path), quiet)
    (folder / "model.safetensors.index.json").write_bytes(text)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match=r"^model\.safetensors\.index\.json: "):
        resolve_model(config(tmp_path), quiet)


def test_a_hub_that_fails_is_replaced_by_the_cache(hub, tmp_path):
    folder = resolve_model(config(tmp_path), quiet)
    hub.status = 503
    assert resolve_model(config(tmp_path), quiet) == folder
    with pytest.raises(ModelLoadError, match="503"):
        resolve_model(ModelConfig(model=REPO, download_dir=str(tmp_path / "other")), quiet)


def test_a_hub_that_cannot_be_reached_is_replaced_by_the_cache(hub, tmp_path, monkeypatch):
    folder = resolve_model(config(tmp_path), quiet)
    with socket.socket() as silent:  # bound, so that nobody else can have the port, but not listening
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert resolve_model(config(tmp_path), quiet) == folder
        with pytest.raises(ModelLoadError, match="cannot be reached"):
            resolve_model(ModelConfig(model=REPO, download_dir=str(tmp_path / "other")), quiet)


def test_unknown_and_gated_models_say_what_to_do(hub, tmp_path):
    with pytest.raises(ModelLoadError, match="neither a local folder nor") as caught:
        resolve_model(config(tmp_path, "someone/unknown"), quiet)
    assert "HF_TOKEN" in caught.value.hint
    with pytest.raises(ModelLoadError, match="gated"):
        resolve_model(config(tmp_path, "someone/gated"), quiet)


@pytest.mark.parametrize(("gone", "said"), [("config.json", "no config.json"), ("model.safetensors", "no safetensors")])
def test_a_repository_without_what_is_needed(hub, tmp_path, gone, said):
    del hub.files[gone]
    with pytest.raises(ModelLoadError, match=said):
        resolve_model(config(tmp_path), quiet)


def test_a_local_folder_is_used_as_it_is(tmp_path):
    assert resolve_model(ModelConfig(model=str(tmp_path)), quiet) == tmp_path


@pytest.mark.parametrize(
    ("model", "said"),
    [("./nowhere", "no folder"), ("/no/where/at/all", "no folder"), ("", "empty"), ("m.gguf", "GGUF")],
)
def test_what_is_no_model_is_said(model, said):
    with pytest.raises(ModelLoadError, match=said):
        resolve_model(ModelConfig(model=model), quiet)


def test_a_file_is_no_model(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(ModelConfig(model=str(file)), quiet)


def test_nothing_is_the_builtin_model(monkeypatch, tmp_path):
    monkeypatch.setattr("troupellm.models.source.BUILTIN_FOLDER", tmp_path)
    with pytest.raises(ModelLoadError, match="missing from this installation"):
        resolve_model(ModelConfig(), quiet)
    (tmp_path / "config.json").touch()
    assert resolve_model(ModelConfig(), quiet) == tmp_path
    assert BUILTIN_FOLDER.name == "weights"


@pytest.mark.parametrize(
    ("model", "names", "expected"),
    [
        (None, (), ("troupe-builtin",)),
        ("someone/tiny", (), ("someone/tiny",)),
        ("someone/tiny", ("a", "b"), ("a", "b")),
    ],
)
def test_served_names(model, names, expected):
    assert served_names(ModelConfig(model=model, served_model_name=names)) == expected


def test_a_folder_is_served_under_its_own_name(tmp_path):
    assert served_names(ModelConfig(model=str(tmp_path) + "/")) == (tmp_path.name,)
