import json

import gguf
import pytest

from troupellm.models.hub.source import BUILTIN_FOLDER, resolve_model, served_names
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4661212096\n"


def quiet(progress) -> None:
    pass


def resolved(model, **config):
    return resolve_model(ModelConfig(model=str(model), **config), quiet)


def refusal(model, **config):
    with pytest.raises(ModelLoadError) as caught:
        resolved(model, **config)
    return f"{caught.value.message}; {caught.value.hint}"


def test_a_local_folder_is_used_as_it_is(tmp_path):
    assert resolved(tmp_path) == tmp_path


def test_a_revision_of_a_local_folder_is_ignored_with_a_note(tmp_path):
    seen = []
    resolve_model(ModelConfig(model=str(tmp_path), revision="main"), seen.append)
    assert [one.detail for one in seen] == ["--revision main is ignored: it is for hub ids"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./nowhere", "no folder"),
        ("/no/where/at/all", "no folder"),
        ("a/b/c", "no folder"),
        ("", "empty"),
        ("m.gguf", "m.gguf is missing"),
        ("owner/m.gguf", "owner/m.gguf is missing"),
        ("./a/b/m.gguf", "m.gguf is missing"),
        ("hf://a/b/c", "names no hub model; write hf://owner/name"),
        ("owner/name:Q8_0/f.gguf", "names the tag Q8_0 and a file"),
        ("two words", "neither a local folder nor a model"),
        ("owner/name@../../x", "no hub id either"),
        ("~an-unknown-user/model", "no hub id either"),
        ("x" * 5000, "neither a local folder nor a model"),
        ("x/" * 3000, "no hub id either"),
    ],
)
def test_a_name_without_a_model_is_refused(model, said):
    assert said in refusal(model)


@pytest.mark.parametrize("revision", ["../../x", "/x", "a\\b"])
def test_a_revision_that_leads_out_of_the_cache_is_refused(revision):
    assert f"--revision {revision} can be no revision; name a branch" in refusal("owner/name", revision=revision)


def test_a_file_is_no_model(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "is a file" in refusal(file)


def test_no_name_is_the_builtin_model():
    assert resolve_model(ModelConfig(), quiet) == BUILTIN_FOLDER
    assert BUILTIN_FOLDER.name == "weights"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model-00002-of-00002.safetensors"])
def test_a_git_lfs_pointer_is_named_with_the_command_that_fetches_the_file(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(POINTER)
    said = refusal(tmp_path)
    assert said.startswith(f"{name} is a Git LFS pointer, not the file itself")
    assert "git lfs pull" in said


def test_a_gguf_file_that_is_a_git_lfs_pointer_is_named(tmp_path):
    file = tmp_path / "model-Q8_0.gguf"
    file.write_bytes(POINTER)
    for model in (file, tmp_path, f"{tmp_path}:q8_0"):
        assert "model-Q8_0.gguf is a Git LFS pointer" in refusal(model)


@pytest.mark.parametrize("base", ["acme/base", None, 7])
def test_an_adapter_is_named_with_its_base_model(tmp_path, base):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (tmp_path / "adapter_model.safetensors").touch()
    said = refusal(tmp_path)
    assert f"is a LoRA adapter for {base if base == 'acme/base' else 'its base model'}" in said
    assert "--lora-modules" in said


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_with_a_config_is_an_adapter_unless_there_is_a_whole_model(tmp_path, weights):
    for name in ("adapter_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps({"base_model_name_or_path": "acme/base"}))
    (tmp_path / weights).touch()
    assert "is a LoRA adapter for acme/base" in refusal(tmp_path)
    assert resolved(tmp_path, load_format="dummy") == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert resolved(tmp_path) == tmp_path


def test_a_folder_with_pickles_only_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 2000)
    assert "pickled weights, such as pytorch_model.bin, which can run code" in refusal(tmp_path)
    assert resolved(tmp_path, load_format="dummy") == tmp_path


@pytest.fixture
def ggufs(tmp_path):
    for name in ("m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf", "BF16/m-00001-of-00002.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
    return tmp_path


def test_a_folder_of_gguf_files_has_the_usual_one_as_default(ggufs):
    seen = []
    found = resolve_model(ModelConfig(model=str(ggufs)), seen.append)
    assert found == ggufs / "m-Q4_K_M.gguf"
    assert [one.detail for one in seen] == [
        "mmproj-F16.gguf is beside the model: images are not read, text is",
        f"{ggufs.name} has 3 GGUF files; m-Q4_K_M.gguf is taken",
    ]


def test_a_tag_chooses_the_gguf_file_of_a_folder(ggufs):
    assert resolved(f"{ggufs}:q8_0") == ggufs / "m-Q8_0.gguf"
    assert "m-00002-of-00002.gguf is missing; it is one of 2 parts" in refusal(f"{ggufs}:BF16")
    assert "has no GGUF file with Q2_K in its name; there are BF16, Q4_K_M, Q8_0" in refusal(f"{ggufs}:Q2_K")


def test_safetensors_win_over_gguf_files_beside_them(ggufs):
    (ggufs / "config.json").write_text("{}")
    assert resolved(ggufs) == ggufs / "m-Q4_K_M.gguf"
    (ggufs / "model.safetensors").touch()
    assert resolved(ggufs) == ggufs
    assert resolved(f"{ggufs}:Q8_0") == ggufs / "m-Q8_0.gguf"


@pytest.mark.parametrize("told", [{"architecture": "clip"}, {"architecture": "llama", "type": "mmproj"}])
def test_a_projector_is_told_from_a_model_by_its_metadata(tmp_path, told):
    for name, metadata in (("a.gguf", told), ("b.gguf", {"architecture": "llama", "type": "model"})):
        writer = gguf.GGUFWriter(str(tmp_path / name), metadata["architecture"])
        if "type" in metadata:
            writer.add_type(metadata["type"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    seen = []
    assert resolve_model(ModelConfig(model=str(tmp_path)), seen.append) == tmp_path / "b.gguf"
    assert [one.detail for one in seen] == ["a.gguf is beside the model: images are not read, text is"]


def test_a_path_wins_over_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolved("acme/tiny").resolve() == tmp_path / "acme" / "tiny"


def test_a_projector_is_no_model(ggufs):
    said = refusal(ggufs / "mmproj-F16.gguf")
    assert "mmproj-F16.gguf is a projector of images (mmproj), no language model; name " in said


@pytest.mark.parametrize(
    ("model", "names", "expected"),
    [
        (None, (), ("troupe-builtin",)),
        ("someone/tiny", (), ("someone/tiny",)),
        ("hf://someone/tiny@v1", (), ("someone/tiny",)),
        ("someone/tiny:Q4_K_M", (), ("someone/tiny:Q4_K_M",)),
        ("someone/tiny@v1:Q4_K_M", (), ("someone/tiny:Q4_K_M",)),
        ("someone/tiny/sub/tiny-Q8_0.gguf", (), ("tiny-Q8_0",)),
        ("gpt2", (), ("gpt2",)),
        ("someone/tiny", ("a", "b"), ("a", "b")),
    ],
)
def test_a_model_is_served_under_its_configured_names(model, names, expected):
    assert served_names(ModelConfig(model=model, served_model_name=names)) == expected


def test_a_folder_is_served_under_its_own_name(ggufs):
    assert served_names(ModelConfig(model=f"{ggufs}/")) == (ggufs.name,)
    assert served_names(ModelConfig(model=f"{ggufs}:Q8_0")) == (f"{ggufs.name}:Q8_0",)
    assert served_names(ModelConfig(model=str(ggufs / "m-Q8_0.gguf"))) == ("m-Q8_0",)
