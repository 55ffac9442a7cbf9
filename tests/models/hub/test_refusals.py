import json
import socket

import pytest

from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.hub.hub_processes import Resolver

REPO = "acme/tiny"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 1000,
}


@pytest.fixture
def tiny(hub):
    hub.add(REPO, FILES)
    hub.add(REPO, FILES | {"config.json": b'{"model_type": "qwen3"}'}, "v1")
    return hub


def test_a_revision_is_followed_in_the_name_or_beside_it(tiny, resolve):
    main, tagged = resolve(REPO), resolve(f"{REPO}@v1")
    assert main.path != tagged.path
    assert b"qwen3" in (tagged.folder / "config.json").read_bytes()
    assert resolve(REPO, revision="v1").path == resolve(f"hf://{REPO}@{tagged.folder.name}").path == tagged.path
    assert tiny.names().count("model.safetensors") == 1  # both revisions have the same


def test_a_revision_that_is_given_twice_is_refused(tiny, resolve):
    outcome = resolve(f"{REPO}@v1", revision="main")
    assert "@v1" in outcome.error
    assert "--revision main" in outcome.error


def test_a_missing_revision_lists_those_that_there_are(tiny, resolve):
    outcome = resolve(f"{REPO}@v9")
    assert (outcome.error, outcome.hint) == (f"{REPO} has no revision v9", "there are main, v1")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_mode_serves_a_complete_snapshot_and_asks_nothing(tiny, resolve, variable):
    online = {name: resolve(name).path for name in (REPO, f"{REPO}@v1")}
    tiny.behave()
    for name, path in online.items():
        outcome = resolve(name, env={variable: "1"})
        assert outcome.path == path
        assert "offline mode is on; commit" in outcome.notes
    assert tiny.seen() == []


@pytest.mark.parametrize("gone", ["model.safetensors", "tokenizer.json", "config.json"])
def test_offline_mode_names_the_first_missing_file_and_the_cache(tiny, resolve, tmp_path, gone):
    (resolve(REPO).folder / gone).unlink()
    outcome = resolve(REPO, env={"HF_HUB_OFFLINE": "1"})
    assert f"{gone} is missing" in outcome.error
    assert str(tmp_path / "cache") in outcome.error
    assert outcome.hint


def test_offline_mode_names_a_damaged_index(tiny, resolve):
    (resolve(REPO).folder / "model.safetensors.index.json").write_bytes(b'{"metadata": ' + b"[" * 100_000)
    assert "model.safetensors.index.json cannot be read" in resolve(REPO, env={"HF_HUB_OFFLINE": "1"}).error


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_fails_is_replaced_by_the_cache(tiny, resolve, tmp_path, status):
    path = resolve(REPO).path
    tiny.behave(status=status, retry_after="120")
    again = resolve(REPO)
    assert again.path == path
    assert f"the hub answers {status} (try again after 120 s); commit" in again.notes
    empty = str(tmp_path / "other")
    outcome = resolve(REPO, download_dir=empty)
    assert outcome.error == (
        f"{REPO}: the hub answers {status} (try again after 120 s), and the cache folder {empty} has no complete copy: "
        "config.json is missing"
    )


@pytest.mark.parametrize("status", [429, 503])
def test_a_file_that_fails_leaves_the_older_snapshot(tiny, resolve, status):
    path = resolve(REPO).path
    tiny.add(REPO, {"model.safetensors": b"other" * 1000})  # main moves on
    tiny.behave(file_status={"model.safetensors": status}, retry_after="60")
    again = resolve(REPO)
    assert again.path == path
    assert f"the hub answers {status}" in again.notes


def test_a_hub_that_cannot_be_reached_is_replaced_by_the_cache(tiny, resolve, tmp_path):
    path = resolve(REPO).path
    with socket.socket() as silent:  # bound, so that the port stays free, but not listening
        silent.bind(("127.0.0.1", 0))
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        assert resolve(REPO, env=env).path == path
        outcome = resolve(REPO, env=env, download_dir=str(tmp_path / "other"))
        assert "the hub cannot be reached" in outcome.error
        assert str(tmp_path / "other") in outcome.error


def test_a_hub_that_never_answers_is_given_up(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = Resolver({"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_ETAG_TIMEOUT": "1"})
        process.begin(REPO, {})
        outcome = process.end()
        process.close()
    assert "the hub cannot be reached" in outcome.error


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        (404, "", "neither a local folder nor"),
        (401, "", "neither a local folder nor"),
        (401, "Invalid credentials in Authorization header", "the hub refuses the token"),
        (403, "", "the hub answers 403"),
        (403, "Access to this resource is disabled.", "the hub answers 403"),
    ],
)
def test_the_cache_serves_where_the_hub_fails_and_not_where_it_refuses(tiny, resolve, status, reason, said):
    resolve(REPO)
    tiny.behave(status=status, reason=reason)
    assert said in resolve(REPO).error


def test_a_page_of_a_network_login_is_no_hub(tiny, resolve):
    tiny.behave(listing="<html>Please log in</html>")
    assert "the hub's answer is no list of files" in resolve(REPO).error


def test_unknown_gated_and_private_models_say_what_to_do(tiny, resolve):
    tiny.behave(gated=[REPO])
    outcome = resolve(REPO)
    assert (outcome.error, outcome.hint) == (
        f"{REPO} is gated",
        "accept its terms on the hub and set HF_TOKEN or --hf-token",
    )
    for name in ("acme/unknown", "unknown", "a--b/c"):
        outcome = resolve(name)
        assert outcome.error == f"{name} is neither a local folder nor a model on the hub"
        assert "HF_TOKEN" in outcome.hint


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"model.safetensors": b""}, "has no config.json"),
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "pickled weights, such as pytorch_model.bin"),
        ({"config.json": b"{}", "tf_model.h5": b"x"}, "weights such as tf_model.h5 are not read"),
        ({"config.json": b"{}"}, "model.safetensors is missing"),
        ({"config.json": b"{}", "mmproj-F16.gguf": b"x"}, "model.safetensors is missing"),
        (
            {"config.json": b"{}", "adapter_config.json": b"{}", "adapter_model.safetensors": b"x"},
            "is a LoRA adapter for its base model",
        ),
        (
            {"adapter_config.json": json.dumps({"base_model_name_or_path": "acme/base"}).encode(),
             "adapter_model.safetensors": b"x"},
            "is a LoRA adapter for acme/base",
        ),
    ],
)  # fmt: skip
def test_a_repository_that_is_no_model_is_refused_before_a_weight_is_fetched(hub, resolve, files, said):
    hub.add("acme/odd", files)
    outcome = resolve("acme/odd")
    assert outcome.error.startswith("acme/odd")
    assert said in outcome.error
    assert outcome.hint
    assert set(hub.names()) <= {"adapter_config.json"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"architectures": ["RiddleForCausalLM"]}, "RiddleForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": "many"}, "hidden_size"),
        ({"architectures": ["BertModel"], "position_embedding_type": "relative_key"}, "position_embedding_type"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_before_a_weight_is_fetched(hub, resolve, settings, said):
    hub.add(REPO, FILES | {"config.json": json.dumps(settings).encode()})
    outcome = resolve(REPO, checked=True, model_impl="troupellm")
    assert outcome.error.startswith("config.json")
    assert said in outcome.error
    assert hub.names() == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"model": {}}'),
        ("chat_template.jinja", b"{% for %}"),
        ("chat_template.jinja", b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        ("tokenizer.json", None),
    ],
)
def test_a_tokenizer_or_template_that_cannot_be_read_is_refused_before_a_weight_is_fetched(
    hub, resolve, tmp_path, name, content
):
    folder = write_tiny_model(tmp_path / "tiny")
    if content is None:  # more tokens than the model has rows
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 100}))
    else:
        (folder / name).write_bytes(content)
    hub.add(REPO, folder)
    assert name.partition(".")[0].replace("_", " ") in resolve(REPO, checked=True).error.replace("_", " ")
    assert "model.safetensors" not in hub.names()
    hub.reset()
    hub.add(REPO, write_tiny_model(tmp_path / "good"))
    assert resolve(REPO, checked=True).names


@pytest.mark.parametrize("name", ["../evil.json", "/etc/config.json"])
def test_paths_out_of_a_repository_are_never_written(name):
    from troupellm.models.hub.files import is_safe_path

    assert not is_safe_path(name)
