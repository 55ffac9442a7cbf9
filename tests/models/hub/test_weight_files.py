import json
import os
import tracemalloc

import pytest

from troupellm.models.hub.files import small_files
from troupellm.models.hub.weight_files import INDEX, SINGLE, folder_weight_files, read_index, weight_files
from troupellm.protocol.errors import ModelLoadError

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("names", "homes", "expected"),
    [
        ([*SHARDS, SINGLE, INDEX], {"a": SHARDS[1], "b": SHARDS[0], "c": SHARDS[2]}, SHARDS),
        ([*SHARDS, "one.safetensors"], {"a": "one.safetensors"}, ["one.safetensors"]),
        ([*SHARDS, SINGLE], {}, [SINGLE]),
        ([*SHARDS, "consolidated-00001-of-00001.safetensors"], {}, SHARDS),
        (["pytorch_model-1-of-2.safetensors", "pytorch_model-2-of-2.safetensors"], {}, None),
        ([*SHARDS, "extra.safetensors"], {}, SHARDS),
        (["gptq_model-4bit-128g.safetensors", "consolidated.safetensors", "adapter_model.safetensors"], {},
         ["gptq_model-4bit-128g.safetensors"]),
        (["one.safetensors", "two.safetensors", "optimizer.safetensors", "2_Dense/model.safetensors"], {},
         ["one.safetensors", "two.safetensors"]),
    ],
)  # fmt: skip
def test_the_files_of_a_model(names, homes, expected):
    assert weight_files([*names, "pytorch_model.bin", "config.json"], homes) == (expected or names)


@pytest.mark.parametrize(
    ("names", "homes", "said"),
    [
        ([SHARDS[0]], {"a": SHARDS[1]}, f"{SHARDS[1]} is missing, though {INDEX} names it"),
        ([SHARDS[0], SHARDS[2]], {}, f"{SHARDS[1]} is missing, one of 3 shards"),
        (SHARDS, {"a": SHARDS[1], "b": SHARDS[0]}, f"{SHARDS[2]} is left over: {INDEX} does not name it"),
        (["config.json"], {}, "model.safetensors is missing"),
        (["pytorch_model.bin"], {}, "pickled weights, such as pytorch_model.bin, which can run code"),
        (["tf_model.h5", "training_args.bin"], {}, "weights such as tf_model.h5 are not read"),
        (["consolidated.safetensors", "adapter_model.safetensors"], {}, "model.safetensors is missing"),
    ],
)
def test_a_missing_file_is_named(names, homes, said):
    with pytest.raises(ModelLoadError) as caught:
        weight_files(names, homes)
    assert said in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../b.safetensors"}}',
        b'{"weight_map": {"a": "b.bin"}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_index_is_refused(data):
    with pytest.raises(ModelLoadError, match=r"^model\.safetensors\.index\.json"):
        read_index(data)


def test_names_of_many_series_take_no_list_of_their_shards():
    names = [f"{number}-00001-of-10000.safetensors" for number in range(2000)]
    tracemalloc.start()
    with pytest.raises(ModelLoadError, match=r"^0-00002-of-10000\.safetensors is missing, one of 10000 shards"):
        weight_files(names, {})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**24  # all lists together: over 2 GB


def test_an_index_of_unusual_size_is_not_read(tmp_path):
    (tmp_path / INDEX).touch()
    os.truncate(tmp_path / INDEX, 2**40)
    with pytest.raises(ModelLoadError, match=r"index\.json has 1,099,511,627,776 bytes; JSON files of at most"):
        folder_weight_files(tmp_path)


def test_a_folder_is_read_by_the_same_rule(tmp_path):
    for name in SHARDS:
        (tmp_path / name).touch()
    (tmp_path / "model.safetensors").mkdir()  # a folder is no weight file
    assert folder_weight_files(tmp_path) == SHARDS
    (tmp_path / "one.safetensors").touch()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert folder_weight_files(tmp_path) == ["one.safetensors"]


def test_a_pipe_in_a_files_place_is_refused_and_a_broken_link_is_a_missing_file(tmp_path):
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors in the folder .* is no regular file"):
        folder_weight_files(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).symlink_to("nowhere")
    with pytest.raises(ModelLoadError, match=r"^model\.safetensors is missing"):
        folder_weight_files(tmp_path)


def test_modules_behind_a_model_are_read_beside_its_weights() -> None:
    modules = ["1_LogitScore/config.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    others = ["2_Dense/pytorch_model.bin", "3_Other/config.json", "1_Pooling/model.safetensors"]
    assert small_files([*modules, *others], with_tokenizer=False) == modules
