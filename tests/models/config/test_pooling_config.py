"""Pooling in checkpoints: read strictly, and an encoder's tensors like a decoder's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from troupellm.models.config.encoder_config import describe_encoder
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.config.pooling_config import classifier_activation, read_labels
from troupellm.models.worker.load_encoder import LoadedEncoder
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints import tiny_encoder


def load(folder: Path) -> LoadedEncoder:
    return LoadedEncoder(folder, ConfigReader.load(folder), EngineConfig(), torch.float32, lambda _: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_encoder.write_encoder(tmp_path, tiny_encoder.bert, pooling="mean_tokens")
    return tmp_path


@pytest.mark.parametrize(
    ("values", "labels", "expected"),
    [
        ({}, 1, "sigmoid"),
        ({}, 3, "softmax"),
        ({"problem_type": "regression"}, 1, "identity"),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, 1, "sigmoid"),
    ],
)
def test_a_classifiers_activation_follows_from_its_labels(values: dict[str, Any], labels: int, expected: str) -> None:
    assert classifier_activation(ConfigReader(values), labels) == expected


def test_an_activation_is_never_imported() -> None:
    reader = ConfigReader({"sentence_transformers": {"activation_fn": "os.system"}})
    with pytest.raises(ModelLoadError, match="activation os.system is not supported"):
        classifier_activation(reader, 1)


def test_labels_have_the_names_of_the_config() -> None:
    assert read_labels(ConfigReader({})) == ("LABEL_0", "LABEL_1")
    assert read_labels(ConfigReader({"num_labels": 1})) == ("LABEL_0",)
    names = {str(number): f"name {number}" for number in range(12)}
    assert read_labels(ConfigReader({"id2label": names})) == tuple(names.values())
    for wrong in ({}, {"1": "a"}, {"0": "a", "2": "b"}, ["a"], "a"):
        with pytest.raises(ModelLoadError, match="id2label"):
            read_labels(ConfigReader({"id2label": wrong}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be one of absolute"),
        ({"is_decoder": True}, "is_decoder must be false"),
        ({"hidden_act": "swish"}, "hidden_act must be one of"),
        ({"num_attention_heads": 5}, "num_attention_heads must divide"),
        ({"max_position_embeddings": 97}, "has shape"),
        ({"num_hidden_layers": 1}, "unknown tensor"),
        ({"num_hidden_layers": 3}, "is missing"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
        ({"matryoshka_dimensions": [0]}, "matryoshka_dimensions must be"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(folder)
    assert str(folder) not in caught.value.message


def test_positions_that_padding_takes_are_no_room_for_a_prompt() -> None:
    settings = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    values = {"architectures": ["RobertaModel"], "num_hidden_layers": 1, "pad_token_id": 1, **settings}
    assert describe_encoder(ConfigReader({**values, "max_position_embeddings": 3})).max_length == 1
    with pytest.raises(ModelLoadError, match="max_position_embeddings must be an integer of at least 3, got 2"):
        describe_encoder(ConfigReader({**values, "max_position_embeddings": 2}))


def test_unknown_tensors_are_refused_and_buffers_are_not(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.position_ids"] = torch.arange(tiny_encoder.POSITIONS)[None]
    save_file(tensors, folder / "model.safetensors")
    assert load(folder).ready(0.0).num_parameters == load(folder).weight_bytes // 4
    tensors["encoder.layer.0.adapter.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="unknown tensor encoder.layer.0.adapter.weight"):
        load(folder)


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pooling_mode": "mean"}, "MEAN"),
        ({"pooling_mode": "cls"}, "CLS"),
        ({"pooling_mode": "lasttoken"}, "LAST"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "LAST"),
        ({"pooling_mode": "max"}, None),
        ({}, None),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, None),
    ],
)
def test_modes_of_sentence_transformers(folder: Path, settings: dict[str, Any], expected: str | None) -> None:
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    if expected is None:
        with pytest.raises(ModelLoadError, match="1_Pooling/config.json"):
            load(folder)
    else:
        ability = load(folder).ready(0.0).pooling
        assert ability is not None
        assert ability.pooling_type == expected


@pytest.mark.parametrize("text", [b"{}", b'[{"type": "\xff"}]', b'[{"type": ' + b"[" * 100_000])
def test_a_damaged_list_of_modules_is_named(folder: Path, text: bytes) -> None:
    (folder / "modules.json").write_bytes(text)
    with pytest.raises(ModelLoadError, match=r"^modules\.json"):
        load(folder)


def test_a_module_cannot_point_outside(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    for path in ("../1_Pooling", "/etc", "", "a/b", ".."):
        modules[1]["path"] = path
        (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ModelLoadError, match=r"modules.json"):
            load(folder)


def test_vectors_are_only_normalized_where_a_module_says_so(tmp_path: Path) -> None:
    tiny_encoder.write_encoder(tmp_path, tiny_encoder.bert, pooling="cls_token", normalize=False)
    ability = load(tmp_path).ready(0.0).pooling
    assert ability is not None
    assert not ability.normalize
    (tmp_path / "modules.json").unlink()  # no file says anything: vLLM's default
    ability = load(tmp_path).ready(0.0).pooling
    assert ability is not None
    assert (ability.normalize, ability.pooling_type) == (True, "CLS")
