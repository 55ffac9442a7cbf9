"""The conventions table: every habit of published checkpoints gives the tokens of transformers, or a refusal by name.

Each row runs with two families. One of them is quick; the other one runs in `make test-all`.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import is_encoder
from troupellm.models.load.architecture import read_config, settle_architecture
from troupellm.models.load.fingerprint import checkpoint_digest
from troupellm.models.quantization.formats import read_format
from troupellm.models.worker.load_encoder import LoadedEncoder
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints import tiny_encoder
from troupellm.tests.support.checkpoints.convention_refusals import REFUSED
from troupellm.tests.support.checkpoints.convention_rows import LOADS
from troupellm.tests.support.checkpoints.deepseek_mtp import write_deepseek
from troupellm.tests.support.checkpoints.tiny_checkpoints import FAMILIES, SINGLE, SIZES, Files
from troupellm.tests.support.quantized.packed_words import GPTQ
from troupellm.tests.support.quantized.quantized_llama import check_tokens, load, tokens_of

NEW_TOKENS = 4


def both_families(rows: object) -> list[object]:
    """Every row with every family; the families take turns to be the quick one."""
    return [
        pytest.param(family, name, marks=[] if (number + place) % len(FAMILIES) == 0 else pytest.mark.slow)
        for number, name in enumerate(rows)  # type: ignore[call-overload]
        for place, family in enumerate(FAMILIES)
    ]


@pytest.mark.parametrize(("family", "row"), both_families(LOADS))
def test_a_checkpoint_with_this_habit_gives_the_tokens_of_transformers(tmp_path: Path, family: str, row: str) -> None:
    change, note, tied = LOADS[row]
    files = Files(family, tied=tied)
    change(files)
    worker, seen = load(files.write(tmp_path))
    check_tokens(files.model, tokens_of(worker, NEW_TOKENS))
    worker.close()
    details = [progress.detail for progress in seen if progress.detail]
    if note:
        assert [detail for detail in details if re.search(note, detail)], details


@pytest.mark.parametrize(("family", "row"), both_families(REFUSED))
def test_a_checkpoint_that_cannot_be_served_is_refused_by_name(tmp_path: Path, family: str, row: str) -> None:
    change, message, hint = REFUSED[row]
    files = Files(family)
    after = change(files)
    files.write(tmp_path)
    if after is not None:
        after(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert re.search(message, caught.value.message), caught.value.message
    assert "\n" not in caught.value.message
    assert str(tmp_path) not in caught.value.message
    assert re.search(hint, caught.value.hint or ""), caught.value.hint


@pytest.mark.parametrize("make", [tiny_encoder.bert, tiny_encoder.roberta])
def test_encoders_norms_may_be_named_gamma_and_beta(tmp_path: Path, make: tiny_encoder.Make) -> None:
    vectors = []
    for name in ("newer", "older"):
        folder = tmp_path / name
        tiny_encoder.write_encoder(folder, make)
        if name == "older":
            tensors = load_file(folder / SINGLE)
            named = {re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", key): tensor for key, tensor in tensors.items()}
            named = {re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", key): tensor for key, tensor in named.items()}
            assert named.keys() != tensors.keys()
            save_file(named, folder / SINGLE, metadata={"format": "pt"})
        config = EngineConfig.from_flat({"model": str(folder)})
        loaded = LoadedEncoder(folder, read_config(folder).reader, config, torch.float32, lambda _: None)
        vectors.append(loaded.parts.decoder.norm.weight)
        layers = loaded.parts.decoder.layers
        vectors[-1] = torch.cat([vectors[-1], *(layer.norm.bias for layer in layers)])
    assert torch.equal(*vectors)


def test_bert_without_architectures_is_an_encoder(tmp_path: Path) -> None:
    tiny_encoder.write_encoder(tmp_path, tiny_encoder.bert)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    reader, notes = read_config(tmp_path)
    assert is_encoder(reader)
    assert notes == ("config.json: architectures is missing; model_type bert is served as BertModel",)


@pytest.mark.parametrize(
    ("names", "served"),
    [
        (["MyOwnForCausalLM", "StableLmForCausalLM"], "StableLmForCausalLM"),
        (["MyOwnForCausalLM", "AnotherForCausalLM"], "MyOwnForCausalLM"),
        (["Qwen2ForSequenceClassification", "Qwen2ForCausalLM"], "Qwen2ForSequenceClassification"),
    ],
)
def test_the_first_name_that_is_known_here_or_in_transformers_is_served(names: list[str], served: str) -> None:
    reader, _ = settle_architecture(ConfigReader({"architectures": names}))
    assert reader.values["architectures"] == [served]


@pytest.mark.parametrize("names", [["Glm4ForCausalLM", "GlmForCausalLM"], ["LlamaModel", "MistralForCausalLM"]])
def test_names_of_two_families_are_refused_though_one_file_reads_both(names: list[str]) -> None:
    with pytest.raises(ModelLoadError, match="must name one family"):
        settle_architecture(ConfigReader({"architectures": names}))


@pytest.mark.parametrize("drafts", [False, True])
def test_layers_for_further_tokens_are_noted_unless_they_draft(tmp_path: Path, drafts: bool) -> None:
    folder, _, _ = write_deepseek(tmp_path)
    method = {"method": "mtp", "num_speculative_tokens": 1}
    worker, seen = load(folder, **({"speculative_config": method} if drafts else {}))
    worker.close()
    noted = [progress.detail for progress in seen if "multi-token prediction" in (progress.detail or "")]
    assert bool(noted) != drafts


def test_a_quantization_file_is_part_of_what_a_model_is(tmp_path: Path) -> None:
    """Blocks of a model must not be found by one whose weights mean something else."""
    files = Files("llama")
    files.others["quantize_config.json"] = {"bits": 4, "group_size": 32}
    before = checkpoint_digest(files.write(tmp_path))
    files.others["quantize_config.json"] = {"bits": 4, "group_size": 64}
    assert checkpoint_digest(files.write(tmp_path)) != before


@pytest.mark.parametrize("names", [("model-1-of-2.safetensors", "model-2-of-2.safetensors"), ("weights.safetensors",)])
def test_a_model_that_transformers_runs_has_the_same_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    torch.manual_seed(4)
    config = transformers.StableLmConfig(**SIZES)
    model = transformers.StableLmForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE) | {"mtp.fc.weight": torch.ones(2)}
    (tmp_path / SINGLE).unlink()
    for place, name in enumerate(names):
        part = sorted(tensors)[place :: len(names)]
        save_file({key: tensors[key] for key in part}, tmp_path / name, metadata={"format": "pt"})
    worker, _ = load(tmp_path)
    check_tokens(model, tokens_of(worker, NEW_TOKENS))
    worker.close()


def test_keys_from_a_file_stay_on_one_line_of_the_log_and_of_an_error(tmp_path: Path) -> None:
    files = Files("llama")
    files.config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "evil\n" + "x" * 999: 0}
    _, notes = read_config(files.write(tmp_path))
    assert all("\n" not in note and len(note) < 300 for note in notes)
    assert "evil?xxx" in notes[0]
    section = {**GPTQ, **{f"off {number}": 0 for number in range(500)}}
    form = read_format(ConfigReader({"quantization_config": section}))
    assert form is not None
    (note,) = form.notes()
    assert "and 469 more cannot change the result" in note
    with pytest.raises(ModelLoadError, match=r"quantization_config\.evil\?key is not supported") as caught:
        read_format(ConfigReader({"quantization_config": GPTQ | {"evil\nkey": 1}}))
    assert "\n" not in caught.value.message


def test_a_json_file_of_unusual_size_is_not_read(tmp_path: Path) -> None:
    Files("llama").write(tmp_path)
    os.truncate(tmp_path / "config.json", 2**40)
    with pytest.raises(ModelLoadError, match=r"config\.json has 1,099,511,627,776 bytes; JSON files of at most"):
        read_config(tmp_path)
