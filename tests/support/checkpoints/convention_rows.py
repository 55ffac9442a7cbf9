"""The conventions table, first half: checkpoints that load, each with one habit of published files.

A row changes the files of a plain tiny checkpoint. `note` is what the load log must say, where something is ignored.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from troupellm.tests.support.checkpoints.tiny_checkpoints import INDEX, Files
from troupellm.tests.support.quantized.fp8_files import e4m3_by_tensor
from troupellm.tests.support.quantized.packed_words import GPTQ, GptqWriter, awq_writer

PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
AUTOGPTQ = {
    "bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
}  # fmt: skip
"""quantize_config.json of AutoGPTQ 0.7, which names no method."""
GPTQMODEL = {
    "bits": 4, "group_size": 32, "desc_act": False, "lm_head": False, "quant_method": "gptq", "method": "gptq",
    "checkpoint_format": "gptq", "format": "gptq", "pack_dtype": "int32", "sym": True,
    "meta": {
        "quantizer": ["gptqmodel:5.8.0"], "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05,
        "damp_auto_increment": 0.01, "static_groups": False, "true_sequential": True, "mse": 0.0, "gptaq": None,
        "act_group_aware": True, "failsafe": {"strategy": "rtn", "threshold": "0.5%", "smooth": None},
        "offload_to_disk": True, "offload_to_disk_path": "./gptqmodel_offload/x/", "pack_impl": "cpu",
        "mock_quantization": False, "gc_mode": "interval", "wait_for_submodule_finalizers": False,
        "auto_forward_data_parallel": True, "hessian": {"chunk_size": None, "staging_dtype": "float32"},
        "vram_strategy": "exclusive",
    },
    "pack_impl": "cpu",
}  # fmt: skip
"""config.json of GPTQModel 5.8."""
AUTOAWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM", "modules_to_not_convert": ["v_proj"]}
"""quant_config.json of AutoAWQ 0.2, which names no method."""
AUTOROUND = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True,
    "data_type": "int", "act_bits": 16, "act_dynamic": True, "act_sym": True, "act_group_size": -1, "iters": 200,
    "lr": 0.005, "nsamples": 512, "seqlen": 2048, "autoround_version": "0.6.0", "enable_quanted_input": True,
    "low_gpu_mem_usage": True, "block_name_to_quantize": "model.layers", "gradient_accumulate_steps": 1,
    "batch_size": 8, "minmax_lr": None, "supported_types": ["Linear"], "to_quant_block_names": None,
}  # fmt: skip
AUTOROUND_AWQ = {key: value for key, value in AUTOROUND.items() if key != "packing_format"} | {
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
    "sym": False,
    "modules_to_not_convert": ["v_proj"],
}
OPTIMUM = {
    "backend": "auto", "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
    "checkpoint_format": "gptq", "damp_percent": 0.1, "dataset": "wikitext2", "desc_act": False,
    "exllama_config": {"version": 1}, "group_size": 32, "hyb_act": False, "max_input_length": None,
    "meta": {"quantizer": ["optimum:1.24.0"]}, "model_seqlen": 2048, "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None, "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None,
    "true_sequential": True, "use_cuda_fp16": True, "use_exllama": True,
}  # fmt: skip
MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
MODELOPT_SECTION = {
    "quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.33.0"},
    "ignore": ["lm_head"], "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "config_groups": {"group_0": {
        "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        "weights": {"dynamic": False, "num_bits": 8, "type": "float"}, "targets": ["Linear"]}},
}  # fmt: skip
Change = Callable[[Files], None]


class Row(NamedTuple):
    """A checkpoint that loads."""

    change: Change
    note: str = ""
    """A regular expression of one line of the load log."""
    tied: bool = False


def config(**values: Any) -> Change:
    return lambda files: files.config.update(values)


def text(before: str, after: str) -> Change:
    """Another spelling of config.json as text."""

    def change(files: Files) -> None:
        written = json.dumps(files.config)
        assert before in written
        files.others["config.json"] = written.replace(before, after, 1).encode()

    return change


def renamed(name: str, **more: Any) -> Change:
    return lambda files: files.config.update(architectures=[name], **more)


def by_type(files: Files) -> None:
    del files.config["architectures"]


def internlm3(files: Files) -> None:
    """InternLM 3 has Qwen's biases as a setting."""
    auto_map = {"AutoConfig": "configuration_internlm3.InternLM3Config"}
    files.config |= {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "auto_map": auto_map}
    files.config |= {"bias": False, "qkv_bias": files.family == "qwen2"}


def llamas_old_spelling(files: Files) -> None:
    files.config |= {"architectures": ["LLaMAForCausalLM"], "qkv_bias": files.family == "qwen2"}


def shards(*names: str, index: bool = False) -> Change:
    def change(files: Files) -> None:
        files.shard(*names)
        if index:
            files.others[INDEX] = {"metadata": {"total_size": 1}, "weight_map": files.homes}

    return change


def beside(*names: str) -> Change:
    """Files of other tools, which are none of the model's."""

    def change(files: Files) -> None:
        for name in names:
            files.tensors[f"of.{name}"] = torch.zeros(1)
            files.homes[f"of.{name}"] = name

    return change


def next_tokens(prefix: str) -> Change:
    def change(files: Files) -> None:
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm") if "layers" in prefix else ("fc", "norm")
        files.tensors |= {f"{prefix}{name}.weight": torch.ones(4) for name in names}
        files.tensors |= {f"{prefix}self_attn.q_proj.weight": torch.ones(4, 4)}

    return change


def layer_behind(files: Files) -> None:
    """A whole layer that config.json does not count, without the marks of DeepSeek's."""
    files.tensors |= {
        name.replace("layers.1", "layers.2"): tensor.clone()
        for name, tensor in files.tensors.items()
        if "layers.1" in name
    }


def gptq(section: dict[str, Any] | None, **others: Any) -> Change:
    def change(files: Files) -> None:
        files.store(GptqWriter(GPTQ))
        if section is not None:
            files.config["quantization_config"] = section
        files.others |= {f"{name}.json": values for name, values in others.items()}

    return change


def awq(section: dict[str, Any] | None, **others: Any) -> Change:
    def change(files: Files) -> None:
        files.store(awq_writer)
        if section is not None:
            files.config["quantization_config"] = section
        files.others |= {f"{name}.json": values for name, values in others.items()}

    return change


def autoround_mixed(files: Files) -> None:
    """One layer in eight bits, one plain."""
    eight, plain = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"

    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if name == plain:
            return {"weight": weight}, weight
        bits = 8 if name == eight else 4
        return GptqWriter({**GPTQ, "bits": bits})(name, weight)

    files.store(store)
    extra = {
        eight: {"bits": 8, "group_size": 32},
        r".*layers\.1\.self_attn\.o_proj": {"bits": 16, "data_type": "float"},
    }
    files.config["quantization_config"] = AUTOROUND | {"extra_config": extra}


def quantized_head(files: Files) -> None:
    """A tied model whose tool has quantized the head apart from the embedding."""
    files.store(GptqWriter(GPTQ), "lm_head")
    files.config["quantization_config"] = GPTQ | {"lm_head": True}


def fp8(
    section: dict[str, Any] | None,
    scale: str,
    *inputs: str,
    channels: bool = False,
    block: bool = False,
    file: dict[str, Any] | None = None,
) -> Change:
    """e4m3 weights whose scales have that name, and calibrated scales of inputs; ModelOpt's file may lie beside."""

    def change(files: Files) -> None:
        files.store(lambda _, weight: e4m3_by_tensor(weight, scale, inputs, channels=channels, block=block))
        if section is not None:
            files.config["quantization_config"] = section
        if file is not None:
            files.others["hf_quant_config.json"] = file

    return change


STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
PER_OUTPUT = MODELOPT_SECTION | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
ONNX = {"per_channel": True, "reduce_range": True, "modes": ["q8"]}
"""quantize_config.json of a conversion for another runtime."""


def two_heads(files: Files) -> None:
    files.config["architectures"] = [files.name, files.name.replace("CausalLM", "SequenceClassification")]


def unknown_first(files: Files) -> None:
    files.config["architectures"] = ["MyOwnForCausalLM", files.name]


def in_text_config(files: Files) -> None:
    gptq(None)(files)
    files.config["text_config"] = {"quantization_config": GPTQMODEL}


LOADS: dict[str, Row] = {
    "json: a byte order mark": Row(text("{", "\ufeff{")),
    "json: NaN and Infinity": Row(text('"attention_dropout": 0.0', '"attention_dropout": NaN, "router": -Infinity')),
    "json: 50.0 for 50": Row(config(num_hidden_layers=2.0, hidden_size=64.0, max_position_embeddings=128.0)),
    "json: null for a missing key": Row(config(head_dim=None, rope_scaling=None, quantization_config=None)),
    "json: 0, false and empty for off": Row(
        config(head_dim=0, sliding_window=0, rope_scaling=False, quantization_config={}, layer_types=[], auto_map="")
    ),
    "json: a rope key that is off": Row(
        config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0}),
        r"config\.json: rope_parameters\.llama_4_scaling_beta is ignored: it is off",
    ),
    "json: sections of a rotation for images": Row(
        config(rope_parameters=None, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}, rope_theta=10000.0)
    ),
    "architecture: the first name of one family": Row(two_heads, r"\w+ForCausalLM is served, of 2 names"),
    "architecture: an unknown name first": Row(unknown_first, r"\w+ForCausalLM is served, of 2 names"),
    "architecture: none, by model_type": Row(by_type, r"architectures is missing; model_type \w+ is served as \w+"),
    "architecture: a published spelling": Row(llamas_old_spelling, "LLaMAForCausalLM is served as LlamaForCausalLM"),
    "architecture: InternLM 3 is Llama": Row(internlm3, "InternLM3ForCausalLM is served as LlamaForCausalLM"),
    "files: shards and their index": Row(shards(*PARTS, index=True)),
    "files: shards without an index": Row(shards(*PARTS)),
    "files: the only safetensors": Row(shards("weights.safetensors")),
    "files: all safetensors": Row(shards("body.safetensors", "rest.safetensors")),
    "files: copies and adapters beside": Row(
        beside("consolidated.safetensors", "adapter_model.safetensors", "optimizer.safetensors")
    ),
    "mtp: a module": Row(next_tokens("mtp."), "3 tensors for multi-token prediction are left out, such as mtp"),
    "mtp: a layer behind the last": Row(next_tokens("model.layers.2."), "5 tensors for multi-token prediction"),
    "mtp: a plain layer behind the last": Row(
        layer_behind, r"\d+ tensors for multi-token prediction are left out, such as model\.layers\.2\."
    ),
    "file: quantize_config.json": Row(
        gptq(None, quantize_config=AUTOGPTQ), r"quantize_config\.json: .*damp_percent.* are ignored"
    ),
    "file: quant_config.json": Row(awq(None, quant_config=AUTOAWQ)),
    "file: quantization_config.json": Row(gptq(None, quantization_config=AUTOROUND)),
    "file: text_config": Row(in_text_config),
    "gptq: Optimum's settings": Row(gptq(OPTIMUM), r"dataset.* are ignored"),
    "file: two that agree": Row(gptq(GPTQMODEL, quantize_config=AUTOGPTQ | {"damp_percent": 0.5})),
    "file: null for the method": Row(gptq({**GPTQMODEL, "quant_method": None})),
    "file: another runtime's": Row(
        lambda files: files.others.update({"quantize_config.json": ONNX}),
        r"quantize_config\.json is not used: it does not say how these weights are quantized",
    ),
    "gptq: GPTQModel's settings": Row(gptq(GPTQMODEL), r"quantization_config\.method, meta, pack_impl cannot change"),
    "auto-round: packed as GPTQ": Row(gptq(AUTOROUND), r"quantization_config\..*iters.* are ignored"),
    "auto-round: layers of other bits": Row(autoround_mixed),
    "auto-round: packed as AWQ": Row(awq(AUTOROUND | {"packing_format": "auto_round:auto_awq", "sym": False})),
    "auto-round: AWQ's own format": Row(awq(AUTOROUND_AWQ), r"quantization_config\..*iters.* are ignored"),
    "head: stored quantized though tied": Row(
        quantized_head, r"lm_head\.qweight is used: the head is stored quantized", tied=True
    ),
    "fp8: fmt float8_e4m3fn": Row(fp8({"quant_method": "fp8", "fmt": "float8_e4m3fn"}, "weight_scale")),
    "fp8: a factor for the whole weight": Row(
        fp8(STATIC, "weight_scale_inv", "activation_scale"), "calibrated input scales are not used"
    ),
    "fp8: blocks that nothing names": Row(fp8({"quant_method": "fp8"}, "weight_scale_inv", block=True)),
    "modelopt: both places, with the same lists": Row(
        fp8(MODELOPT_SECTION, "weight_scale", "input_scale", file=MODELOPT_FILE), "calibrated scales of the KV cache"
    ),
    "modelopt: hf_quant_config.json": Row(
        fp8(None, "weight_scale", "input_scale", file=MODELOPT_FILE), "calibrated scales of the KV cache are not used"
    ),
    "modelopt: beside the older words": Row(
        fp8(STATIC | {"ignored_layers": ["lm_head"]}, "weight_scale", "input_scale", file=MODELOPT_FILE)
    ),
    "modelopt: config.json": Row(fp8(MODELOPT_SECTION, "weight_scale", "input_scale"), "producer.* are ignored"),
    "modelopt: a scale per output": Row(fp8(PER_OUTPUT, "weight_scale", channels=True)),
}
