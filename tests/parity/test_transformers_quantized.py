"""Decoders that run by the code of `transformers`, quantized: as their checkpoint stores them, and at load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from troupellm.models.quantization.on_load import INT4_GROUPS, QUANTIZE
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.tests.support.checkpoints.decoder_families import SIZES
from troupellm.tests.support.quantized.bitsandbytes_files import four_bits
from troupellm.tests.support.quantized.fp8_files import e4m3_by_tensor
from troupellm.tests.support.quantized.packed_words import GPTQ, GptqWriter
from troupellm.tests.support.quantized.quantized_llama import (
    Store,
    check_tokens,
    linears,
    load,
    quantize_inputs,
    tokens_of,
)
from troupellm.tests.support.quantized.small_floats import modelopt_nvfp4

NARROW = SIZES | {"intermediate_size": 128, "pad_token_id": None}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "stablelm": lambda: transformers.StableLmConfig(**NARROW, use_qkv_bias=True),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{k: v for k, v in NARROW.items() if k != "num_key_value_heads"}),
    "phimoe": lambda: transformers.PhimoeConfig(**NARROW, num_local_experts=4, num_experts_per_tok=2),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **NARROW, moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_layer_start_index=0, moe_layer_interval=1
    ),
}
"""The last two have experts of their own, which `transformers` puts together, and plain routers."""
LAYERS = ("_proj.weight", "query_key_value.weight", ".dense.weight", ".w1.weight", ".w2.weight", ".w3.weight")
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
FORMATS: dict[str, tuple[dict[str, Any], Store]] = {
    "fp8": (STATIC, lambda _, weight: e4m3_by_tensor(weight, "weight_scale_inv", ("activation_scale",))),
    "gptq": (GPTQ, GptqWriter(GPTQ)),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda _, weight: modelopt_nvfp4(weight)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda _, w: four_bits(w, "nf4", nested=True)),
}


def written(folder: Path, family: str, name: str) -> tuple[Path, Any]:
    """A checkpoint in that format, with published names, and the model of `transformers` that it stands for."""
    torch.manual_seed(6)
    plain, quantized, (section, store) = folder / "plain", folder / "quantized", FORMATS[name]
    transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(plain)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for tensor in list(tensors):
        if not tensor.endswith(LAYERS):
            stored[tensor] = tensors[tensor]
            continue
        layer = tensor.removesuffix(".weight")
        parts, tensors[tensor] = store(layer, tensors[tensor])
        stored |= {f"{layer}.{key}": part.clone().contiguous() for key, part in parts.items() if key != "bias"}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return quantized, transformers.AutoModelForCausalLM.from_pretrained(plain).eval()


def products(seen: list[LoadProgress]) -> str:
    return next((progress.detail for progress in seen if progress.detail.startswith("products: ")), "")


@pytest.mark.parametrize(
    ("family", "name", "said"),
    [
        ("stablelm", "fp8", "products: 14 fp8, 1 plain"),
        ("stablelm", "nf4", "products: 1 plain, 14 table4, dequantized at load"),
        pytest.param("stablelm", "gptq", "products: 14 int4, 1 plain", marks=pytest.mark.slow),
        ("gpt_neox", "gptq", "products: 4 int4, 5 plain"),
        pytest.param("gpt_neox", "nvfp4", "products: 5 plain, 4 table4", marks=pytest.mark.slow),
        ("phimoe", "nvfp4", "products: 1 plain, 8 table4"),
        ("ernie4_5_moe", "fp8", "products: 14 fp8, 1 plain"),
        pytest.param("ernie4_5_moe", "gptq", "products: 14 int4, 1 plain", marks=pytest.mark.slow),
    ],
)
def test_stored_layers_stay_in_their_codes_and_give_their_tokens(
    tmp_path: Path, family: str, name: str, said: str
) -> None:
    folder, model = written(tmp_path, family, name)
    worker, seen = load(folder, model_impl="transformers")
    check_tokens(model, tokens_of(worker))
    worker.close()
    assert products(seen) == said
    assert any("calibrated input scales" in progress.detail for progress in seen) == (name in ("fp8", "nvfp4"))


@pytest.mark.parametrize("mode", ["int8", "int8-weight-only", "int4", "fp8"])
def test_plain_layers_are_quantized_at_load(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(6)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["stablelm"]()).eval()
    model.save_pretrained(tmp_path)
    worker, seen = load(tmp_path, model_impl="transformers", quantization=mode)
    head = () if mode.startswith("int8") else ("lm_head",)
    for name, layer in linears(model).items():
        if name not in head:
            layer.weight.data = QUANTIZE[mode](layer.weight.data).dequantize()  # type: ignore[union-attr,index]
    if mode == "int8":
        quantize_inputs(model, plain=())
    check_tokens(model, tokens_of(worker), 0.05 if mode == "int8" else 1e-4)
    worker.close()
    assert INT4_GROUPS[-1] == 32, "which divides all inputs"
    kind = {"int8-weight-only": "int8 weight-only"}.get(mode, mode)
    assert products(seen) == (f"products: 14 {kind}, 1 plain" if head else f"products: 15 {kind}")


def test_codes_may_be_rounded_once_more(tmp_path: Path) -> None:
    folder, model = written(tmp_path, "stablelm", "nf4")
    worker, seen = load(folder, model_impl="transformers", quantization="int8")
    for layer in linears(model).values():
        layer.weight.data = QUANTIZE["int8"](layer.weight.data).dequantize()  # type: ignore[union-attr]
    quantize_inputs(model, plain=())
    check_tokens(model, tokens_of(worker), 0.05)
    worker.close()
    assert products(seen) == "products: 15 int8"


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("weight_scale_inv", r"tensor model\.layers\.1\.mlp\.up_proj\.weight_scale is missing"),
        ("activation_scale", r"model\.layers\.1\.mlp\.up_proj\.input_scale is missing, though activation_scheme is"),
        ("weight", r"missing tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_a_lost_tensor_is_named(tmp_path: Path, lost: str, message: str) -> None:
    folder, _ = written(tmp_path, "stablelm", "fp8")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.1.mlp.up_proj.{lost}"]
    if lost == "weight":
        tensors = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=message):
        load(folder, model_impl="transformers")


def test_a_tensor_of_nothing_is_named(tmp_path: Path) -> None:
    folder, _ = written(tmp_path, "stablelm", "fp8")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"model.another.weight": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ModelLoadError, match=r"unexpected tensor model\.another\.weight"):
        load(folder, model_impl="transformers")
