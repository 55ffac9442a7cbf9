"""Adapters of embeddings, whole embeddings and heads, and DoRA: those that are read, and the refusals of others."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from troupellm.models.adapters.adapter import Adapter, read_adapter
from troupellm.models.adapters.files import adapter_header
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.protocol.errors import AdapterError
from troupellm.tests.support.adapters.peft_folders import MODEL, write_adapter

QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"
TIED = msgspec.structs.replace(MODEL, tie_word_embeddings=True)


class Base:
    """The same numbers for each weight, and a bias of ones."""

    def __init__(self, weight: Tensor, *, plain: bool = True) -> None:
        self.weight, self.plain = weight, plain
        self.asked: list[str] = []

    def stored(self, module: str, shape: tuple[int, int]) -> Tensor | None:
        self.asked.append(module)
        assert shape == self.weight.shape
        return self.weight if self.plain else None

    def computed(self, module: str, shape: tuple[int, int], *, bias: bool) -> tuple[Tensor, Tensor | None] | None:
        self.asked.append(module)
        assert shape == self.weight.shape
        return (self.weight, torch.ones(shape[0]) if bias else None) if self.plain else None


def read(folder: Path, model: DecoderConfig = MODEL, **options: Any) -> Adapter:
    return read_adapter(folder, model, 16, **options)


def refusal(folder: Path, model: DecoderConfig = MODEL, **options: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        read(folder, model, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(("module", "name"), [(HEAD, "head"), (EMBEDDING, "embedding")])
def test_a_copy_of_a_wide_weight_beside_its_adapter_is_fine_and_a_trained_one_is_not(
    tmp_path: Path, module: str, name: str
) -> None:
    weight = torch.randn(40, 16)
    parts: dict[str, Tensor | None] = {f"{module}.base_layer.weight": weight}
    if module == HEAD:
        write_adapter(tmp_path, MODEL, ("lm_head",), changed=parts)
    else:
        vectors = {f"{module}.lora_embedding_A": torch.ones(4, 40), f"{module}.lora_embedding_B": torch.ones(16, 4)}
        write_adapter(tmp_path, MODEL, (), changed={**parts, **vectors})
    base = Base(weight)
    assert read(tmp_path, base=base).rank == 4
    assert base.asked == [module.rpartition(".")[2]]
    assert f"base_layer.weight is another {name} than the base model's" in refusal(tmp_path, base=Base(weight + 1))
    assert f"is another {name}" in refusal(tmp_path, base=Base(weight, plain=False))
    assert f"is another {name}" in refusal(tmp_path)


def test_an_embeddings_adapter_has_its_scale_in_the_second_matrix(tmp_path: Path) -> None:
    first, second = torch.randn(4, 40), torch.randn(16, 4)
    changed: dict[str, Tensor | None] = {
        f"{EMBEDDING}.lora_embedding_A": first,
        f"{EMBEDDING}.lora_embedding_B": second,
    }
    write_adapter(tmp_path, MODEL, (), rank=4, lora_alpha=12, changed=changed)
    found = read(tmp_path)
    assert found.vocabulary is not None
    assert found.vocabulary.down is not None
    assert found.vocabulary.up is not None
    assert torch.equal(found.vocabulary.down, first.t())
    assert torch.equal(found.vocabulary.up, second.t() * 3.0)
    assert (found.sites, found.rank, adapter_header(tmp_path).rank) == ({}, 4, 4)
    assert found.num_bytes == first.nbytes + second.nbytes


def test_whole_weights_take_the_place_of_the_base_models(tmp_path: Path) -> None:
    head, embedding = torch.randn(40, 16), torch.randn(40, 16)
    write_adapter(tmp_path, MODEL, ("q_proj",), changed={f"{HEAD}.weight": head, f"{EMBEDDING}.weight": embedding})
    found = read(tmp_path)
    assert found.vocabulary is not None
    assert found.vocabulary.head is not None
    assert found.vocabulary.embedding is not None
    assert torch.equal(found.vocabulary.head, head)
    assert torch.equal(found.vocabulary.embedding, embedding)
    assert "whole weight (modules_to_save), which is served on a CPU only" in refusal(tmp_path, whole_weights=False)
    for change in ({"head_bias": True}, {"head_normed": True}):
        assert "replaces a head with a bias or a norm" in refusal(tmp_path, msgspec.structs.replace(MODEL, **change))


def test_an_embedding_and_a_head_that_share_one_adapter_are_refused(tmp_path: Path) -> None:
    whole: dict[str, Tensor | None] = {f"{EMBEDDING}.weight": torch.randn(40, 16)}
    write_adapter(tmp_path, MODEL, ("q_proj",), changed=whole, ensure_weight_tying=True)
    assert read(tmp_path).vocabulary is not None  # nothing is tied in this model
    assert "is shared with the head (ensure_weight_tying)" in refusal(tmp_path, TIED)


def test_dora_brings_each_row_of_the_adapted_weight_to_its_length(tmp_path: Path) -> None:
    weight, lengths = torch.randn(16, 16), torch.rand(16) + 0.5
    changed: dict[str, Tensor | None] = {f"{QUERY}.lora_magnitude_vector": lengths}
    one_layer = msgspec.structs.replace(MODEL, layers=MODEL.layers[:1], qkv_bias=True)
    tensors = write_adapter(tmp_path, one_layer, ("q_proj",), rank=4, lora_alpha=8, use_dora=True, changed=changed)
    part = read(tmp_path, one_layer, base=Base(weight)).sites[0, "qkv"][0]
    assert part is not None
    adapted = weight + 2.0 * tensors[f"{QUERY}.lora_B.weight"] @ tensors[f"{QUERY}.lora_A.weight"]
    expected = adapted * (lengths / adapted.norm(dim=1))[:, None]
    assert part.factor is not None
    assert part.bias is not None
    x, bias = torch.randn(3, 16), torch.ones(16)
    found = (x @ weight.t() + bias) * part.factor + x @ part.down.t() @ part.up.t() + part.bias
    assert torch.allclose(found, x @ expected.t() + bias, atol=1e-5)


def test_dora_without_a_stored_base_or_without_lengths_is_refused(tmp_path: Path) -> None:
    lengths: dict[str, Tensor | None] = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_magnitude_vector": torch.ones(16)
        for layer in range(2)
    }
    write_adapter(tmp_path, MODEL, ("q_proj",), use_dora=True, changed=lengths)
    assert "needs the base model's stored weights" in refusal(tmp_path)
    assert "needs the base model's stored weights" in refusal(tmp_path, base=Base(torch.ones(16, 16), plain=False))
    assert "NaN or infinite" in refusal(tmp_path, base=Base(torch.full((16, 16), float("nan"))))
    head: dict[str, Tensor | None] = {f"{HEAD}.lora_magnitude_vector": torch.ones(40)}
    write_adapter(tmp_path, MODEL, ("lm_head",), use_dora=True, changed=head)
    assert "a module for which DoRA is not served" in refusal(tmp_path)
