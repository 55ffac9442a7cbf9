"""Tiny models of any family as GGUF files, written as llama.cpp's converters write them.

Keys and changes of tensors are those of `conversion/` there; names of tensors are those of the package gguf. Nothing
of the product is used. Weights lie on a grid that every type tested holds exactly, so that a file means its model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

from troupellm.tests.support.gguf.gguf_llama import Kind, add_byte_level, byte_level

Arch = gguf.MODEL_ARCH
Tensors = Iterable[tuple[str, Tensor]]
EIGHT_BITS = torch.arange(-127, 128) * 2.0**-9
FOUR_BITS = torch.tensor([-6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 0.5, 1.5, 2.0, 3.0, 4.0, 6.0]) * 2.0**-5
"""Some of the values that types of so many bits hold exactly, if the largest one is in each block of 32."""
EXPERTS = "mlp.experts."


@dataclass(frozen=True)
class Converter:
    """One of llama.cpp's converter classes.

    Attributes:
        keys: writes what `base_keys` does not.
        tensors: what becomes of one tensor, by its name in the model's state.
        plain: whether `base_keys` is left out, as the converters of Gemma 1 and 2 and of Phi-3 do.
        turned: rows of queries and keys are permuted.
        norm_shift: added to norms.
    """

    arch: Arch
    keys: Callable[[gguf.GGUFWriter, dict[str, Any]], None] = lambda writer, config: None
    tensors: Callable[[str, Tensor, dict[str, Any]], Tensors] = lambda name, tensor, config: [(name, tensor)]
    plain: bool = False
    turned: bool = False
    norm_shift: float = 0.0


def write(
    path: Path,
    converter: Converter,
    config: transformers.PretrainedConfig,
    kind: Kind = Kind.F32,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    experts: Kind | None = None,
) -> transformers.PreTrainedModel:
    """Write a random model of this configuration.

    Args:
        kind: of all tensors but norms, biases and routers.
        extra: writes more keys and tensors.
        experts: another type for all experts.

    Returns:
        the model.
    """
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[converter.arch])
    config.vocab_size = add_byte_level(writer, byte_level(), "gpt-2")
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    values = config.to_dict()
    state = _randomized(model, 1.0 - converter.norm_shift, four_bits=experts == Kind.MXFP4)
    if not converter.plain:
        base_keys(writer, values)
    converter.keys(writer, values)
    names = gguf.get_tensor_name_map(converter.arch, values["num_hidden_layers"])
    for name, tensor in state.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        for changed, part in converter.tensors(name, tensor, values):
            there = _gguf_name(names, changed)
            own = experts or kind if "_exps." in there else kind
            _add(writer, there, _turned(converter, changed, part, values), own, converter)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _randomized(model: transformers.PreTrainedModel, norm: float, *, four_bits: bool) -> dict[str, Tensor]:
    """The model's state after its tensors were drawn anew: norms around `norm`, the others on the grid.

    Args:
        four_bits: experts lie on MXFP4's grid.
    """
    random = torch.Generator().manual_seed(5)
    state = {name: tensor for name, tensor in model.state_dict().items() if "inv_freq" not in name}
    for name, tensor in state.items():
        if "norm" in name:
            tensor.copy_(norm + torch.rand(tensor.shape, generator=random) - 0.5)
        elif tensor.ndim == 1 or "bias" in name:
            tensor.copy_(torch.rand(tensor.shape, generator=random) - 0.5)
        else:
            values = FOUR_BITS if four_bits and EXPERTS in name else EIGHT_BITS
            drawn = values[torch.randint(len(values), tensor.shape, generator=random)]
            rows, columns = torch.arange(tensor.shape[-2])[:, None], torch.arange(tensor.shape[-1])
            largest = (rows + columns) % 16 == 0  # once in each run of 32, along rows and along columns
            tensor.copy_(torch.where(largest & (drawn != -values[-1]), values[-1], drawn))
    return state


def _gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    if name.startswith(("blk.", "rope_")):
        return name
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, f"the package gguf has no name for {name}"
    return found


def _turned(converter: Converter, name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Halves of each head's queries and keys become neighbours."""
    if not converter.turned or "_proj." not in name or not ("q_proj" in name or "k_proj" in name):
        return tensor
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Kind, converter: Converter) -> None:
    if name.endswith("norm.weight"):
        tensor = tensor + converter.norm_shift
    if (
        ".ffn_gate_inp" in name
        or "shortconv.conv" in name
        or name.endswith(("norm.weight", ".bias", "sinks.weight"))
        or tensor.squeeze().ndim < 2
    ):
        kind = Kind.F32
    values = np.ascontiguousarray(tensor.detach().squeeze().numpy())
    data = gguf.quants.quantize(values, kind)
    np.testing.assert_array_equal(gguf.quants.dequantize(data, kind).reshape(values.shape), values)
    writer.add_tensor(name, data, raw_dtype=kind)


def base_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As `TextModel.set_gguf_parameters`."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(rope[key])
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    _optional(writer, config)
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_file_type(0)


def _optional(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    for keys, add in (
        (("rms_norm_eps",), writer.add_layer_norm_rms_eps),
        (("layer_norm_eps",), writer.add_layer_norm_eps),
        (("num_local_experts", "num_experts"), writer.add_expert_count),
        (("num_experts_per_tok",), writer.add_expert_used_count),
        (("n_group",), writer.add_expert_group_count),
        (("topk_group",), writer.add_expert_group_used_count),
    ):
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is not None:
            add(value)
    scoring = config.get("scoring_func")
    if scoring is not None:
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if scoring == "sigmoid" else kinds.SOFTMAX)


def split_experts(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensors:
    """A model's state holds gate and up of all experts in one tensor; files have one for each of them."""
    if name.endswith(f"{EXPERTS}gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    if name.endswith(f"{EXPERTS}down_proj"):
        return [(f"{name}.weight", tensor)]
    return [(name, tensor)]


def older_experts(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensors:
    """As files of Mixtral were before April 2024: a tensor for each expert."""
    found = []
    for changed, part in split_experts(name, tensor, config):
        if EXPERTS not in changed:
            found.append((changed, part))
            continue
        layer, kind = changed.split(".")[2], changed.split(".")[-2].removesuffix("_proj")
        found += [(f"blk.{layer}.ffn_{kind}.{number}.weight", expert) for number, expert in enumerate(part)]
    return found


def fused_experts(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensors:
    """As `--fuse-gate-up-exps` writes them."""
    if name.endswith(f"{EXPERTS}gate_up_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", tensor)]
    return split_experts(name, tensor, config)


def gpt_oss_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensors:
    """Gate and up alternate in the model's state, with inputs before outputs."""
    if name.endswith("sinks"):
        return [(f"{name}.weight", tensor)]
    if name.endswith("gate_up_proj"):
        flat, stem = tensor.transpose(1, 2), name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", flat[:, ::2]), (f"{stem}up_proj.weight", flat[:, 1::2])]
    if name.endswith("gate_up_proj_bias"):
        stem = name.removesuffix("gate_up_proj_bias")
        return [(f"{stem}gate_proj.bias", tensor[:, ::2]), (f"{stem}up_proj.bias", tensor[:, 1::2])]
    if name.endswith("down_proj"):
        return [(f"{name}.weight", tensor.transpose(1, 2))]
    return [(name.replace("down_proj_bias", "down_proj.bias"), tensor)]


def deepseek_tensors(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensors:
    """The weight of keys and values is split by head, and that of keys is transposed."""
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)]
    if not name.endswith("kv_b_proj.weight"):
        return split_experts(name, tensor, config)
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    by_head = tensor.view(config["num_attention_heads"], plain + value, -1)
    keys, values = torch.split(by_head, [plain, value], dim=1)
    return [
        (name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)),
        (name.replace("kv_b_proj", "v_b_proj"), values),
    ]
