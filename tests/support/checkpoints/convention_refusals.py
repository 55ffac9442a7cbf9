"""The conventions table, second half: checkpoints that are refused, with what the refusal says.

A row changes the files of a plain tiny checkpoint, before they are written or (by what it returns) afterwards.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from troupellm.tests.support.checkpoints.convention_rows import (
    AUTOAWQ,
    AUTOGPTQ,
    AUTOROUND,
    GPTQMODEL,
    MODELOPT_FILE,
    MODELOPT_SECTION,
    PARTS,
    awq,
    gptq,
)
from troupellm.tests.support.checkpoints.tiny_checkpoints import INDEX, SINGLE, Files

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4970000000\n"
NVFP4 = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"], "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"},
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 32}}},
}  # fmt: skip
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
W8A8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}}},
}  # fmt: skip
INSTEAD = "--quantization int8, int4 or fp8"
Change = Callable[[Files], Callable[[Path], None] | None]


class Row(NamedTuple):
    """A checkpoint that is refused."""

    change: Change
    message: str
    """A regular expression of the refusal: file, key and value."""
    hint: str = ""
    """The same of what would work."""


def config(**values: Any) -> Change:
    return lambda files: files.config.update(values)


def section(values: dict[str, Any], modelopt: dict[str, Any] | None = None) -> Change:
    def change(files: Files) -> None:
        files.config["quantization_config"] = values
        if modelopt is not None:
            files.others["hf_quant_config.json"] = modelopt

    return change


def two_families(files: Files) -> None:
    files.config["architectures"] = [files.name, "MistralForCausalLM"]


def own_code(files: Files) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_my_own.MyOwnForCausalLM"}
    files.config |= {"architectures": ["MyOwnForCausalLM"], "model_type": "my_own", "auto_map": auto_map}


def unknown_type(files: Files) -> None:
    del files.config["architectures"]
    files.config["model_type"] = "my_own"


def rope(**values: Any) -> Change:
    return config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **values})


def sharded(*, index: bool) -> Change:
    def change(files: Files) -> None:
        files.shard(*PARTS)
        if index:
            files.others[INDEX] = {"weight_map": files.homes}

    return change


def part_missing(*, index: bool) -> Change:
    def change(files: Files) -> Callable[[Path], None]:
        sharded(index=index)(files)
        return lambda folder: (folder / PARTS[1]).unlink()

    return change


def tensor_twice(files: Files) -> Callable[[Path], None]:
    """Two whole sets of shards, as two downloads of different releases leave them."""
    sharded(index=False)(files)

    def again(folder: Path) -> None:
        for number in (1, 2, 3):
            data = (folder / PARTS[0]).read_bytes()
            (folder / f"model-0000{number}-of-00003.safetensors").write_bytes(data)

    return again


def part_left_over(files: Files) -> None:
    sharded(index=True)(files)
    files.others[INDEX] = {"weight_map": dict.fromkeys(files.tensors, PARTS[0])}


def tensor_left_over(files: Files) -> None:
    files.tensors["model.layers.0.self_attn.extra.weight"] = torch.ones(4)


def tensor_missing(files: Files) -> None:
    del files.tensors["model.layers.1.mlp.down_proj.weight"]


def cut(files: Files) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / SINGLE, 10_000)


def lengthened(files: Files) -> Callable[[Path], None]:
    return lambda folder: (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes() + b"x" * 5)


def pointer(name: str) -> Change:
    return lambda files: files.others.update({name: POINTER})


def only_pickles(files: Files) -> Callable[[Path], None]:
    return lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin")


def a_page(files: Files) -> Callable[[Path], None]:
    return lambda folder: (folder / SINGLE).write_bytes(b"<!doctype html><title>Sign in</title>")


REFUSED: dict[str, Row] = {
    "json: a value of another kind": Row(config(hidden_size="64"), 'config.json: hidden_size must be .* got "64"'),
    "json: Infinity for a size": Row(config(vocab_size=float("inf")), "config.json: vocab_size .* got Infinity"),
    "json: a key that changes the rotation": Row(
        rope(llama_4_scaling_beta=0.1), r"rope_parameters\.llama_4_scaling_beta is not supported, got 0\.1"
    ),
    "architecture: two families": Row(
        two_families, r"config\.json: architectures must name one family, got \[.*MistralForCausalLM", "leave only"
    ),
    "architecture: its own code": Row(
        own_code, r"config\.json: MyOwnForCausalLM needs its own Python code \(auto_map\)", "the closest names: "
    ),
    "architecture: an unknown type": Row(
        unknown_type, r'model_type is not known, and architectures is missing, got "my_own"', "add architectures"
    ),
    "files: a part is missing": Row(
        part_missing(index=True), f"{PARTS[1]} is missing, though {INDEX} names it", "download"
    ),
    "files: a part is missing, no index": Row(
        part_missing(index=False), f"{PARTS[1]} is missing, one of 2", "download"
    ),
    "files: a tensor is there twice": Row(tensor_twice, r"tensor \S+ is in model-00001-of-00002\.safetensors too"),
    "files: a part is left over": Row(part_left_over, f"{PARTS[1]} is left over: {INDEX} does not name it", "remove"),
    "files: a tensor is left over": Row(tensor_left_over, r"unknown tensor model\.layers\.0\.self_attn\.extra\.weight"),
    "files: a tensor is missing": Row(tensor_missing, r"tensor model\.layers\.1\.mlp\.down_proj\.weight is missing"),
    "files: cut": Row(cut, r"model\.safetensors is cut: it has 10,000 of \d{3},\d{3} bytes", "download the file again"),
    "files: too long": Row(lengthened, r"is damaged: it has [\d,]+ bytes, its header describes [\d,]+", "download"),
    "files: a web page": Row(a_page, "model.safetensors cannot be read: it does not begin like", "download"),
    "files: weights are an LFS pointer": Row(pointer(SINGLE), "model.safetensors is a Git LFS pointer", "git lfs pull"),
    "files: the index is an LFS pointer": Row(pointer(INDEX), "index.json is a Git LFS pointer", "git lfs pull"),
    "files: config.json is an LFS pointer": Row(pointer("config.json"), "config.json is a Git LFS", "git lfs pull"),
    "files: only pickles": Row(only_pickles, r"only pickled weights, such as pytorch_model\.bin", "safetensors"),
    "quantization: two files disagree": Row(
        gptq(GPTQMODEL, quantize_config=AUTOGPTQ | {"group_size": 64}),
        r"quantize_config\.json: group_size is 64, but config\.json: quantization_config\.group_size is 32",
        "remove or correct",
    ),
    "quantization: two lists of layers": Row(
        section(MODELOPT_SECTION | {"ignore": ["lm_head", "o_proj"]}, MODELOPT_FILE),
        r'hf_quant_config\.json: quantization\.exclude_modules is \["lm_head"\], but .*\.ignore is \["lm_head", "o_p',
        "remove or correct",
    ),
    "quantization: two tools": Row(
        gptq(GPTQMODEL, quant_config=AUTOAWQ), r'quant_config\.json: quant_method is "awq", but config\.json'
    ),
    "quantization: no file": Row(
        gptq(None), r"\.q(weight|zeros) is stored quantized, and no file", "quantize_config.json"
    ),
    "quantization: no file for AWQ": Row(awq(None), r"\.q(weight|zeros) is stored quantized", "quant_config.json"),
    "quantization: an unknown key": Row(
        section(GPTQMODEL | {"codebook": "e8"}), r'quantization_config\.codebook is not supported, got "e8"', INSTEAD
    ),
    "quantization: torchao": Row(section(TORCHAO), r'quant_method must be .* got "torchao"', INSTEAD),
    "quantization: MLX": Row(
        config(quantization={"group_size": 64, "bits": 4}, quantization_config={"group_size": 64, "bits": 4}),
        r'config\.json: quantization is the packing of MLX, which is not read, got {"group_size": 64',
        "original checkpoint",
    ),
    "quantization: NVFP4 in groups of 32": Row(
        section(NVFP4), r"group_0\.weights\.group_size must be 16, got 32", INSTEAD
    ),
    "modelopt: NVFP4 with smoothed inputs": Row(
        section(MODELOPT_SECTION | {"quant_algo": "NVFP4_AWQ"}),
        r'quantization_config\.quant_algo .* got "NVFP4_AWQ"',
        INSTEAD,
    ),
    "modelopt: the same in its own file": Row(
        lambda files: files.others.update(
            {"hf_quant_config.json": {"quantization": MODELOPT_FILE["quantization"] | {"quant_algo": "NVFP4_AWQ"}}}
        ),
        r'hf_quant_config\.json: quantization\.quant_algo must be one of FP8, .* got "NVFP4_AWQ"',
        INSTEAD,
    ),
    "modelopt: layers of their own, and one algorithm": Row(
        section(MODELOPT_SECTION | {"quantized_layers": {"a": {"quant_algo": "FP8"}}}),
        "quantized_layers must be missing unless quant_algo is MIXED_PRECISION",
    ),
    "modelopt: sparse": Row(
        section(MODELOPT_SECTION | {"sparsity_config": {"format": "sparse-24"}}), "sparsity_config is not supported"
    ),
    "gptq: 5 bits": Row(
        section(GPTQMODEL | {"bits": 5}), r"quantization_config\.bits must be one of 2, 3, 4, 8, got 5", INSTEAD
    ),
    "gptq: planes of bits": Row(
        section(GPTQMODEL | {"bits": 3, "checkpoint_format": "gptq_p"}), 'checkpoint_format .* got "gptq_p"', INSTEAD
    ),
    "gptq: marlin": Row(
        section(GPTQMODEL | {"checkpoint_format": "marlin"}), 'checkpoint_format .* got "marlin"', INSTEAD
    ),
    "gptq: marlin by a flag": Row(section(GPTQMODEL | {"is_marlin_format": True}), "is_marlin_format is not supported"),
    "gptq: words of 16 bits": Row(section(GPTQMODEL | {"pack_dtype": "int16"}), 'pack_dtype .* got "int16"'),
    "gptq: a rotation": Row(section(GPTQMODEL | {"rotation": "hadamard"}), 'rotation is not supported, got "hadamard"'),
    "gptq: an adapter": Row(section(GPTQMODEL | {"adapter": {"name": "lora"}}), "adapter is not supported"),
    "awq: gemv": Row(
        section(AUTOAWQ | {"quant_method": "awq", "version": "gemv"}), 'version must be .* got "gemv"', INSTEAD
    ),
    "awq: gemv_fast": Row(section(GPTQMODEL | {"quant_method": "awq", "format": "gemv_fast"}), 'got "gemv_fast"'),
    "auto-round: another packing": Row(
        section(AUTOROUND | {"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}),
        'packing_format .* got "auto_round:llm_c',
    ),
    "auto-round: inputs in 8 bits": Row(section(AUTOROUND | {"act_bits": 8}), "act_bits must be 16.* got 8", INSTEAD),
    "auto-round: floats": Row(
        section(AUTOROUND | {"data_type": "mx_fp"}), 'data_type must be one of int.* got "mx_fp"'
    ),
    "auto-round: a layer of 1 bit": Row(
        section(AUTOROUND | {"extra_config": {"lm_head": {"bits": 1}}}),
        r"extra_config\.lm_head\.bits must be one of 2, 3, 4, 5, 6, 7, 8, or 16, got 1",
    ),
    "auto-round: a rotation": Row(
        section(AUTOROUND | {"rotation_config": {"hadamard": True}}), "rotation_config is not supported"
    ),
    "compressed-tensors: a rotation": Row(
        section(W8A8 | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}),
        r"quantization_config\.transform_config is not supported, got",
    ),
    "compressed-tensors: sparse": Row(
        section(W8A8 | {"sparsity_config": {"format": "sparse-24-bitmask"}}),
        r'sparsity_config\.format must be dense, got "sparse-24-bitmask"',
    ),
}
