"""GGUF files written by the format's own package: its own weights, and the tokens of transformers run on them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import troupellm
from troupellm.kernels.quantized_linear import Int8Channel
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.gguf.weights import GgufWeights
from troupellm.models.hub.source import resolve_model, served_names
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.gguf.gguf_llama import SIZES, Kind, Written
from troupellm.tests.support.quantized.quantized_llama import check_tokens, linears, load, quantize_inputs, tokens_of

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
MIXTURES = {
    "q5_k_m": {"": Kind.Q5_K, "attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.": Kind.Q6_K},
    "q3_k_m": {"": Kind.Q3_K, "attn_v": Kind.Q5_K, "attn_output": Kind.Q4_K, "ffn_down": Kind.Q4_K},
    "q2_k": {"": Kind.Q2_K, "attn_v": Kind.Q4_K, "ffn_down": Kind.Q3_K, "output.": Kind.Q6_K},
    "q4_1": {"": Kind.Q4_1, "attn_v": Kind.Q5_1, "ffn_down": Kind.Q5_0, "output.": Kind.Q8_0},
    "iq4_xs": {"": Kind.IQ4_XS, "attn_v": Kind.Q5_K, "ffn_down": Kind.IQ4_NL, "output.": Kind.Q6_K},
    "iq3_m": {"": Kind.IQ3_S, "attn_v": Kind.IQ3_XXS, "ffn_down": Kind.IQ2_S, "output.": Kind.Q5_K},
    "iq1_m": {"": Kind.IQ2_XXS, "attn_v": Kind.IQ2_XS, "ffn_down": Kind.IQ1_M, "ffn_up": Kind.IQ1_S},
    "mxfp4": {"": Kind.MXFP4, "attn_q": Kind.TQ1_0, "attn_k": Kind.TQ2_0, "token_embd": Kind.Q5_K},
}
MIX = {"": Kind.Q4_K, "attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.": Kind.Q6_K, "token_embd": Kind.Q4_K}


def llama(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**SIZES | changes)


def llama3_factors() -> torch.Tensor:
    """As llama.cpp's converter works them out: what each frequency is divided by."""
    plain = 1 / 10000.0 ** (np.arange(0, 64, 2) / 64)
    factors = []
    for wave in 2 * np.pi / plain:
        if wave < 32 / 4.0:
            factors.append(1.0)
        elif wave > 32 / 1.0:
            factors.append(8.0)
        else:
            smooth = (32 / wave - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return torch.tensor(factors, dtype=torch.float32)


MODELS: dict[str, Callable[[Path], Written]] = {
    "q8_0": lambda path: Written(path, llama(), {"": Kind.Q8_0}),
    "q4_0": lambda path: Written(path, llama(tie_word_embeddings=True), {"": Kind.Q4_0}),
    "q4_k_m": lambda path: Written(path, llama(), MIX),
    "f16": lambda path: Written(path, llama(), {"": Kind.F16}),
    "bf16": lambda path: Written(path, llama(), {"": Kind.BF16}),
    "biases": lambda path: Written(path, llama(attention_bias=True), {"": Kind.Q8_0}),
    "qwen2": lambda path: Written(path, transformers.Qwen2Config(**SIZES), {"": Kind.Q8_0}, pre="qwen2"),
    "qwen3": lambda path: Written(
        path,
        transformers.Qwen3Config(**SIZES | {"num_attention_heads": 8}, head_dim=64, tie_word_embeddings=True),
        MIX,
        pre="qwen2",
    ),
    "llama3": lambda path: Written(
        path, llama(rope_parameters=LLAMA3), {"": Kind.Q8_0}, pre="llama-bpe", rope_factors=llama3_factors()
    ),
    "yarn": lambda path: Written(
        path,
        llama(rope_parameters=YARN),
        {"": Kind.Q8_0},
        extra={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
        },
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_tokens_of_mixtures_are_those_of_the_weights_in_the_file(tmp_path: Path, name: str) -> None:
    """Every product is computed in the codes of its own type."""
    written = Written(tmp_path / "tiny.gguf", llama(tie_word_embeddings=name == "mxfp4"), MIXTURES[name])
    worker, seen = load(written.path)
    check_tokens(written.model, tokens_of(worker))
    if shutil.which("g++") is not None:
        assert "products: 5 gguf" in [progress.detail for progress in seen]
    worker.close()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_weights_in_the_file(tmp_path: Path, name: str) -> None:
    written = MODELS[name](tmp_path / "tiny.gguf")
    worker, _ = load(written.path)
    check_tokens(written.model, tokens_of(worker))
    worker.close()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_a_mixture_of_layouts_is_computed_with_in_its_blocks(tmp_path: Path) -> None:
    """Queries and keys of Q4_K_M are in another layout than its values, beside which they are computed."""
    worker, seen = load(MODELS["q4_k_m"](tmp_path / "tiny.gguf").path)
    assert "products: 5 gguf" in [progress.detail for progress in seen]
    worker.close()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = MODELS["q8_0"](tmp_path / "tiny.gguf").path
    weights, state = GgufWeights(path, torch.float32, 64), path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    with pytest.raises(ModelLoadError, match=r"(?m)^tiny\.gguf has changed while the model was read from it$"):
        weights.finish()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return MODELS["q8_0"](tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_the_whole_engine_serves_a_file(tiny: Written) -> None:
    assert served_names(ModelConfig(model=str(tiny.path))) == ("tiny.Q8_0",)
    prompt = "the quick brown fox"
    ids = tiny.tokenizer.encode(prompt, add_special_tokens=False).ids
    output = tiny.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=12,
        min_new_tokens=12,
        pad_token_id=0,
    )[0, len(ids) :].tolist()
    async with troupellm.Engine(str(tiny.path), num_gpu_blocks_override=32, max_num_prefill_tokens=64) as engine:
        answer = await engine.generate(prompt, temperature=0, max_tokens=12, ignore_eos=True)
        async with engine.chat([{"role": "user", "content": "hi"}], max_tokens=3, ignore_eos=True) as chat:
            parts = [delta async for delta in chat]
    assert list(answer.token_ids) == output
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert parts
    assert list(chat.prompt_token_ids) == tiny.tokenizer.encode(asked).ids


def test_another_format_than_the_files_is_refused(tiny: Written) -> None:
    with pytest.raises(ValueError, match="load_format safetensors does not fit a GGUF file"):
        load(tiny.path, load_format="safetensors")
    with pytest.raises(ValueError, match="quantization must be int8"):
        load(tiny.path, quantization="int4")


@pytest.mark.parametrize("name", ["q4_0", "q4_k_m"])
def test_blocks_computed_in_eight_bits(tmp_path: Path, name: str) -> None:
    """`--quantization int8`: what is stored in other bits is rounded once more, and inputs are rounded too."""
    written = MODELS[name](tmp_path / "tiny.gguf")
    worker, seen = load(written.path, quantization="int8")
    assert "products: 5 int8" in [progress.detail for progress in seen]
    with torch.no_grad():
        for layer in linears(written.model).values():
            layer.weight = torch.nn.Parameter(Int8Channel.quantize(layer.weight).dequantize())
    quantize_inputs(written.model, plain=())
    check_tokens(written.model, tokens_of(worker), 0.05)
    worker.close()


def test_a_folder_with_one_file_is_that_file(tiny: Written, tmp_path: Path) -> None:
    assert resolve_model(ModelConfig(model=str(tiny.path.parent)), lambda _: None) == tiny.path
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="has 2 GGUF files"):
        resolve_model(ModelConfig(model=str(tmp_path)), lambda _: None)


def test_a_model_in_parts(tmp_path: Path) -> None:
    """Each part a file of its own with some of the tensors, the first with the metadata."""
    written = MODELS["q8_0"](tmp_path / "whole.gguf")
    reader = gguf.GGUFReader(written.path)
    tensors = sorted(reader.tensors, key=lambda tensor: tensor.name)
    for number in range(3):
        path = tmp_path / f"part-{number + 1:05}-of-00003.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        if number == 0:
            copy_metadata(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[number::3]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    worker, _ = load(tmp_path / "part-00001-of-00003.gguf")
    check_tokens(written.model, tokens_of(worker))
    worker.close()
    second, third = (tmp_path / f"part-0000{number}-of-00003.gguf" for number in (2, 3))
    data = second.read_bytes()
    second.write_bytes(third.read_bytes())
    third.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"^part-00002-of-00003\.gguf: split.no is 2, expected 1"):
        load(tmp_path / "part-00001-of-00003.gguf")
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"^part-00002-of-00003\.gguf is missing"):
        load(tmp_path / "part-00001-of-00003.gguf")


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_shared_count": 1}, "llama.expert_shared_count is not supported"),
        ({"llama.attention.causal": True, "llama.logit_scale": 0.5}, "llama.logit_scale is not supported"),
        ({"llama.attention.causal": False}, "llama.attention.causal is not supported"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier is not supported"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count must be 64"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type must be one of none, linear, yarn"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    written = Written(tmp_path / "odd.gguf", llama(), {"": Kind.Q8_0}, extra=extra)
    with pytest.raises(ModelLoadError, match=f"^odd.gguf: {message}"):
        load(written.path)


def test_a_whole_number_may_be_written_as_a_float(tmp_path: Path) -> None:
    written = Written(tmp_path / "odd.gguf", llama(), {"": Kind.Q8_0}, extra={"llama.nextn_predict_layers": 0.0})
    model = describe_decoder(ConfigReader.load(written.path))
    assert GgufWeights(written.path, torch.float32, model.layers[0].head_dim).left_out == []


def test_tensors_are_held_against_the_model(tiny: Written) -> None:
    model = describe_decoder(ConfigReader.load(tiny.path))
    weights = GgufWeights(tiny.path, torch.float32, model.layers[0].head_dim)
    with pytest.raises(ModelLoadError, match=r"tensor blk.0.ffn_up.weight has shape \[512, 256\], expected \[1, 2\]"):
        weights.linear("model.layers.0.mlp.up_proj", (1, 2))
    with pytest.raises(ModelLoadError, match=r"tensor blk.0.ffn_up.weight is missing"):
        weights.linear("model.layers.0.mlp.up_proj", (512, 256))
    with pytest.raises(ModelLoadError, match="unknown tensor"):
        weights.finish()
