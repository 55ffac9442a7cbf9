"""What a quantized checkpoint takes: no less than is held, and far less than its numbers in full."""

from pathlib import Path

import pytest
import torch
from gguf_llama import SIZES, Kind, Written
from packed_words import GPTQ, GptqWriter
from quantized_llama import load, tiny_llama, write_model
from transformers import LlamaConfig

from troupellm.kernels.linear import PackedLinear
from troupellm.models.hf_config import ConfigReader
from troupellm.models.quantization.formats import read_format
from troupellm.models.quantization.report import packed_weights
from troupellm.models.registry import describe_decoder
from troupellm.models.stored_size import stored_size


def write(folder: Path, name: str) -> Path:
    if name == "gptq":
        model = tiny_llama(hidden_size=256, intermediate_size=512)
        return write_model(folder, model, GptqWriter(GPTQ), GPTQ)
    tied = name == "gguf_tied"
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 3}, tie_word_embeddings=tied)
    return Written(folder / "a.gguf", config, {"": Kind.Q4_K, "ffn_down": Kind.Q6_K}).path


def held(weight: PackedLinear) -> int:
    """Bytes of one product."""
    tensors = {id(tensor): tensor for tensor in getattr(weight.fast, "_held", ()) if isinstance(tensor, torch.Tensor)}
    whole = weight.in_features * weight.out_features * 4
    return sum(tensor.nbytes for tensor in tensors.values()) if weight.fast is not None else whole


@pytest.mark.parametrize("name", ["gptq", "gguf", "gguf_tied"])
def test_what_is_planned_is_what_is_held(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    reader = ConfigReader.load(path)
    model = describe_decoder(reader)
    size = stored_size(path, model, read_format(reader), torch.float32)
    assert size is not None
    assert size.method == name.partition("_")[0]
    worker, seen = load(path)
    weights = {id(weight): weight for weight in packed_weights(worker._parts)}.values()
    taken = sum(map(held, weights)) + model.vocab_size * model.hidden_size * 4
    full = sum(weight.in_features * weight.out_features * 4 for weight in weights)
    if any("dequantized" in progress.detail for progress in seen):
        pytest.skip("no compiled products here")
    assert len(weights) >= 9
    assert size.nbytes is not None
    assert taken <= size.nbytes < 0.7 * full
    assert size.method in seen[0].detail
    worker.close()


def test_what_is_dequantized_counts_in_full(tmp_path: Path) -> None:
    path = write(tmp_path, "gptq")
    reader = ConfigReader.load(path)
    size = stored_size(path, describe_decoder(reader), read_format(reader), torch.bfloat16)
    assert size == ("gptq", None)
    assert stored_size(path, describe_decoder(reader), None, torch.float32) is None
