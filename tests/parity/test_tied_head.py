"""A head that is stored beside an embedding and differs from it is used, as `transformers` does, for all settings."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from troupellm.models.checkpoint import safetensors
from troupellm.models.load.architecture import describe_model
from troupellm.models.load.tied_head import settle_head
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES, SIZES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt

NAMES = ("model.embed_tokens.weight", "lm_head.weight")


def say_tied(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def untied(folder: Path, family: str) -> Path:
    Pair(folder, FAMILIES[family]())
    say_tied(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_with_images"])
def test_a_head_of_its_own_is_used(tmp_path: Path, family: str) -> None:
    pair = Pair.stored(untied(tmp_path, family))
    assert not pair.config.tie_word_embeddings
    prompt = make_prompt(20)
    torch.testing.assert_close(pair.own_logits(prompt), pair.logits(prompt)[-1], atol=1e-4, rtol=1e-4)


def test_an_untied_head_is_noted_and_counted(tmp_path: Path) -> None:
    seen = list[LoadProgress]()
    folder = untied(tmp_path, "llama")
    described = describe_model(folder)
    assert described.tie_word_embeddings
    assert settle_head(folder, described, seen.append) == msgspec.structs.replace(described, tie_word_embeddings=False)
    assert [progress.detail for progress in seen] == [
        "lm_head.weight is used: it is not the embedding, although tie_word_embeddings says so"
    ]


def test_one_that_is_the_embedding_is_stored_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row counts, too."""
    monkeypatch.setattr(safetensors, "_COMPARED_ROWS", 7)
    Pair(tmp_path, transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True}))
    tensors = load_file(tmp_path / "model.safetensors")
    for changed in (False, True):
        head = tensors[NAMES[0]].clone()
        head[-1, -1] += changed
        save_file(tensors | {NAMES[1]: head}, tmp_path / "model.safetensors")
        assert settle_head(tmp_path, describe_model(tmp_path), lambda _: None).tie_word_embeddings == (not changed)
        Pair.stored(tmp_path)  # nothing is left over


@pytest.mark.parametrize("kind", ["another type", "another shape"])
def test_one_that_says_the_same_or_cannot_be_used_is_passed_over(tmp_path: Path, kind: str) -> None:
    Pair(tmp_path, transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True}))
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors[NAMES[0]].bfloat16()
    head = embedding.float() if kind == "another type" else torch.zeros(embedding.shape[0] + 20, embedding.shape[1])
    save_file(tensors | {NAMES[0]: embedding, NAMES[1]: head}, tmp_path / "model.safetensors")
    seen = list[LoadProgress]()
    assert settle_head(tmp_path, describe_model(tmp_path), seen.append).tie_word_embeddings
    assert [progress.detail for progress in seen] == [
        "lm_head.weight is not used: it has another shape than the embedding"
    ] * (kind == "another shape")


def test_a_head_that_is_quantized_is_no_embedding(tmp_path: Path) -> None:
    Pair(tmp_path, transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True}))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {NAMES[1]: tensors[NAMES[0]].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert not settle_head(tmp_path, describe_model(tmp_path), lambda _: None).tie_word_embeddings


def without_prefix(folder: Path, *left_out: str) -> None:
    """As Qwen3-Embedding is published: the body's names begin below `model.`."""
    tensors = load_file(folder / "model.safetensors")
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name not in left_out}
    save_file(named, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied"])
def test_a_body_without_its_prefix_is_read(tmp_path: Path, family: str) -> None:
    pair, prompt = Pair(tmp_path, FAMILIES[family]()), make_prompt(20)
    expected = pair.own_logits(prompt)
    without_prefix(tmp_path)
    pair.open()
    assert pair.config.head == "lm"
    assert torch.equal(pair.own_logits(prompt), expected)


def test_a_body_without_prefix_and_head_embeds(tmp_path: Path) -> None:
    """Qwen3-Embedding-8B, whose config.json names an architecture with a head that it does not have."""
    pair, seen = Pair(tmp_path, FAMILIES["qwen3"]()), list[LoadProgress]()
    without_prefix(tmp_path, NAMES[1])
    described = describe_model(tmp_path)
    assert settle_head(tmp_path, described, seen.append) == msgspec.structs.replace(described, head="none")
    assert [progress.detail for progress in seen] == [
        "there is no lm_head.weight and no name begins with model.: the model embeds and does not write"
    ]
    norm = pair.decoder.norm
    pair.open()
    assert pair.decoder.head is None
    assert torch.equal(pair.decoder.norm, norm)


def test_a_missing_head_of_a_model_that_writes_is_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path, FAMILIES["qwen3"]())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[NAMES[1]]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"tensor lm_head\.weight is missing"):
        pair.open()
