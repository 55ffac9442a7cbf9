import hashlib
import json
from pathlib import Path

import pytest

from troupellm.models.hub.source import resolve_model
from troupellm.protocol.config.engine import ModelConfig
from troupellm.tests.support.hub.hub_processes import LoopbackHub, Resolver, until_written

REPO = "acme/tiny"
WEIGHTS = bytes(range(256)) * 1000
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
SINGLE = "model.safetensors"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{ }",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    SINGLE: WEIGHTS,
}
UNREAD = dict.fromkeys(
    (
        "pytorch_model.bin",
        "modeling_custom.py",
        "README.md",
        "onnx/config.json",
        "trainer_state.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "tf_model.h5",
        "onnx/model.onnx",
        "a.pth",
        "b.ckpt",
        "c.pt",
        "original/model.safetensors",
        "preprocessor_config.json",
        "evil/1_Pooling/config.json",
        "2_Other/model.safetensors",
        "optimizer.safetensors",
        ".gitattributes",
    ),
    b"never fetched",
)


def blobs(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--acme--tiny" / "blobs"


@pytest.fixture
def tiny(hub: LoopbackHub) -> LoopbackHub:
    hub.add(REPO, FILES | UNREAD)
    return hub


def test_only_files_that_are_read_are_fetched_and_each_once(tiny, resolve, tmp_path):
    outcome = resolve(REPO)
    assert outcome.names == set(FILES)
    assert (outcome.folder / SINGLE).read_bytes() == WEIGHTS
    assert outcome.folder == tmp_path / "cache" / "models--acme--tiny" / "snapshots" / tiny.commit(REPO)
    assert tiny.names() == sorted(FILES)
    done = [one["done"] for one in outcome.downloads]
    assert done == sorted(done)
    assert outcome.downloads[-1]["done"] == outcome.downloads[-1]["total"] == sum(map(len, FILES.values()))
    tiny.behave()
    again = resolve(REPO)
    assert again.path == outcome.path
    assert not again.downloads
    assert tiny.names() == []


def test_vocabulary_files_are_fetched_where_there_is_no_tokenizer_json(hub, resolve):
    files = {name: data for name, data in FILES.items() if name != "tokenizer.json"}
    more = dict.fromkeys(("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"), b"{}")
    more |= {"chat_template.jinja": b"{}", "additional_chat_templates/rag.jinja": b"{}", "quantize_config.json": b"{}"}
    more |= {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "sentence_bert_config.json": b"{}"}
    hub.add(REPO, files | more)
    assert resolve(REPO).names == set(files | more)


def test_the_tokenizer_of_another_repository_is_fetched_without_its_weights(tiny, resolve):
    assert SINGLE not in resolve(REPO, load_format="dummy").names
    tiny.add("acme/words", {"tokenizer.json": b"{}", "vocab.txt": b""})
    assert resolve("acme/words", load_format="dummy").names == {"tokenizer.json"}


def test_the_tokenizer_of_a_model_is_left_out_where_another_one_is_named(tiny, resolve):
    assert resolve(REPO, tokenizer="acme/words").names == {"config.json", "generation_config.json", SINGLE}


def test_sharded_weights_are_those_of_the_index(hub, resolve):
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    files = {name: data for name, data in FILES.items() if name != SINGLE}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), **dict.fromkeys(shards, b"x" * 10)}
    hub.add(REPO, files | {"extra.safetensors": b""})
    assert resolve(REPO).names == set(files)
    hub.add("acme/short", {name: data for name, data in files.items() if name != shards[1]})
    outcome = resolve("acme/short")
    assert outcome.error.startswith(f"{shards[1]} is missing, though model.safetensors.index.json names it")


def test_large_files_come_from_the_other_host_without_the_token(tiny, resolve):
    tiny.behave(private={REPO: "hf_secret"})
    outcome = resolve(REPO, hf_token="hf_secret")
    assert (outcome.folder / SINGLE).read_bytes() == WEIGHTS
    seen = tiny.seen()
    assert {entry["token"] for entry in seen if entry["place"] == "hub"} == {"Bearer hf_secret"}
    assert {entry["token"] for entry in seen if entry["place"] == "cdn"} == {None}


def test_the_token_of_the_environment_is_used(tiny, resolve):
    tiny.behave(private={REPO: "hf_secret"})
    assert resolve(REPO).error.startswith(f"{REPO} is neither a local folder nor a model on the hub")
    assert resolve(REPO, env={"HF_TOKEN": "hf_secret"}).names == set(FILES)


def test_a_cut_connection_resumes_at_the_byte_where_it_broke(tiny, resolve):
    tiny.behave(cuts={SINGLE: [50_000, 70_000]})
    assert (resolve(REPO).folder / SINGLE).read_bytes() == WEIGHTS
    ranges = [asked for name, asked in tiny.downloads() if name == SINGLE]
    last = len(WEIGHTS) - 1
    assert ranges == [f"bytes=0-{last}", f"bytes=50000-{last}", f"bytes=120000-{last}"]


def test_a_killed_process_is_resumed_by_the_next_one_and_nothing_is_fetched_twice(tiny, tmp_path):
    tiny.behave(stalls={SINGLE: 100_000})
    killed = Resolver({"HF_ENDPOINT": tiny.url, "HF_HOME": str(tmp_path / "home")})
    killed.begin(REPO, {})
    tiny.until_stalled()
    part = until_written(tmp_path / "home" / "hub" / blobs(tmp_path).relative_to(tmp_path / "cache"), DIGEST)
    killed.kill()
    left = part.stat().st_size
    before = tiny.downloads()
    next_one = Resolver({"HF_ENDPOINT": tiny.url, "HF_HUB_CACHE": str(tmp_path / "home" / "hub")})
    next_one.begin(REPO, {})
    outcome = next_one.end()
    next_one.close()
    assert (outcome.folder / SINGLE).read_bytes() == WEIGHTS
    assert tiny.downloads()[len(before) :] == [(SINGLE, f"bytes={left}-{len(WEIGHTS) - 1}")]


def test_an_engine_that_is_closed_stops_the_download_and_keeps_its_bytes(tiny, tmp_path, monkeypatch):
    class Closed(Exception):
        """As the engine's sink raises when it is not wanted any more."""

    def sink(progress):
        if progress.detail == SINGLE and progress.done > 0:
            raise Closed

    monkeypatch.setenv("HF_ENDPOINT", tiny.url)
    tiny.behave(cuts={SINGLE: [100_000]})
    with pytest.raises(Closed):
        resolve_model(ModelConfig(model=REPO, download_dir=str(tmp_path / "cache")), sink)
    assert (blobs(tmp_path) / f"{DIGEST}.partial").exists()


def test_a_partial_file_of_a_killed_process_is_resumed_and_counts_as_done(tiny, resolve, tmp_path):
    digest = DIGEST
    blobs(tmp_path).mkdir(parents=True)
    (blobs(tmp_path) / f"{digest}.partial").write_bytes(WEIGHTS[:200_000])
    outcome = resolve(REPO)
    assert (outcome.folder / SINGLE).read_bytes() == WEIGHTS
    assert [asked for name, asked in tiny.downloads() if name == SINGLE] == [f"bytes=200000-{len(WEIGHTS) - 1}"]
    assert min(one["done"] for one in outcome.downloads if one["detail"] == SINGLE) > 200_000
    assert {path.name for path in blobs(tmp_path).iterdir() if path.name.startswith(digest)} == {digest}


def test_a_server_that_ignores_ranges_sends_the_file_anew(tiny, resolve, tmp_path):
    tiny.behave(whole=[SINGLE])
    blobs(tmp_path).mkdir(parents=True)
    (blobs(tmp_path) / f"{DIGEST}.partial").write_bytes(b"old" * 1000)
    assert (resolve(REPO).folder / SINGLE).read_bytes() == WEIGHTS


@pytest.mark.parametrize("left", [b"something else", b"x" * (len(WEIGHTS) + 1), b"x" * len(WEIGHTS)])
def test_a_partial_file_with_other_content_is_fetched_again(tiny, resolve, tmp_path, left):
    blobs(tmp_path).mkdir(parents=True)
    (blobs(tmp_path) / f"{DIGEST}.partial").write_bytes(left)
    assert (resolve(REPO).folder / SINGLE).read_bytes() == WEIGHTS


@pytest.mark.parametrize("fault", ["changed", "html"])
@pytest.mark.parametrize("name", [SINGLE, "tokenizer.json"])
def test_a_damaged_body_is_fetched_again_and_then_refused(tiny, resolve, tmp_path, fault, name):
    tiny.behave(**{fault: {name: 1}})
    assert (resolve(REPO).folder / name).read_bytes() == FILES[name]
    tiny.behave(**{fault: {name: 5}})
    outcome = resolve(REPO, download_dir=str(tmp_path / "other"))
    assert outcome.error.startswith(f"{name} was damaged in the download, twice, and removed: ")
    left = [path.name for path in (tmp_path / "other" / "models--acme--tiny" / "blobs").iterdir()]
    assert not [name for name in left if name.endswith(".partial")]


def test_a_cached_file_that_was_cut_is_fetched_again(tiny, resolve):
    folder = resolve(REPO).folder
    blob = (folder / SINGLE).resolve()
    blob.write_bytes(WEIGHTS[:1000])
    tiny.behave()
    assert (resolve(REPO).folder / SINGLE).read_bytes() == WEIGHTS
    assert tiny.names() == [SINGLE]


def test_the_disk_is_checked_before_the_first_byte_of_weights(tiny, resolve, tmp_path):
    tiny.behave(sizes={SINGLE: 10**17})
    outcome = resolve(REPO)
    assert outcome.error.startswith(f"{REPO} needs 100000 TB, ")
    assert outcome.error.endswith(f" free in {tmp_path / 'cache'}")
    assert SINGLE not in tiny.names()


def test_a_cache_that_cannot_be_written_is_named(tiny, resolve, tmp_path):
    (tmp_path / "file").touch()
    outcome = resolve(REPO, download_dir=str(tmp_path / "file"))
    assert str(tmp_path / "file") in outcome.error
    assert "--download-dir" in outcome.hint
