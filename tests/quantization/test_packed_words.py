"""GPTQ and AWQ: files packed number by number, as the formats are documented; the same weights and tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.quantized.packed_words import AWQ, GPTQ, GptqWriter, awq_writer, packed
from troupellm.tests.support.quantized.quantized_llama import (
    check_tokens,
    linears,
    load,
    save_sharded,
    take_outlined,
    tiny_llama,
    tokens_of,
    write_model,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "v1_symmetric": {},
    "v1_asymmetric": {"sym": False},
    "v2_asymmetric": {"sym": False, "checkpoint_format": "gptq_v2"},
    "act_order": {"desc_act": True, "sym": False},
    "one_group": {"group_size": -1},
    "uneven_groups": {"group_size": 48},
    "eight_bits": {"bits": 8},
    "eight_bits_asymmetric": {"bits": 8, "sym": False, "group_size": -1},
    "three_bits": {"bits": 3},
    "three_bits_act_order": {"bits": 3, "sym": False, "desc_act": True},
    "two_bits_asymmetric": {"bits": 2, "sym": False},
    "layers_apart": {"dynamic": {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}}},
}


@pytest.mark.parametrize("name", [*VARIANTS, "awq"])
def test_weights_and_tokens_are_those_that_were_packed(tmp_path: Path, name: str) -> None:
    model = tiny_llama()
    # As its writers mean it, "gate" is a router, and gate_proj, whose name begins so, is quantized.
    config = AWQ | {"modules_to_not_convert": ["v_proj", "gate"]} if name == "awq" else GPTQ | VARIANTS[name]
    writer = awq_writer if name == "awq" else GptqWriter(config)
    folder = write_model(tmp_path, model, writer, config, shards=3 if name == "act_order" else 1)
    form = read_format(ConfigReader.load(folder))
    assert form is not None
    stored = QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)
    plain = {"awq": ("lm_head", "v_proj"), "layers_apart": ("lm_head", "o_proj")}.get(name, ("lm_head",))
    for layer, module in linears(model).items():
        weight = take_outlined(stored, layer, tuple(module.weight.shape))
        assert isinstance(weight, QuantizedWeight) != layer.endswith(plain)
        values = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        torch.testing.assert_close(values, module.weight.detach(), rtol=1e-6, atol=1e-7)
    worker, _ = load(folder)
    check_tokens(model, tokens_of(worker))
    worker.close()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_nothing_are_read_as_gptqmodel_writes_them(tmp_path: Path, bits: int) -> None:
    """It subtracts one from every number of a word at once (of three bits, from each alone): a zero borrows."""
    rows, columns, layer = 64, 32, "model.layers.0.mlp.up_proj"
    generator = np.random.default_rng(bits)
    values, zeros = generator.integers(0, 1 << bits, (rows, columns)), generator.integers(0, 1 << bits, (1, rows))
    zeros[0, ::5] = 0
    ones = sum(1 << place for place in range(0, 32, bits))
    if bits == 3:
        words = packed((zeros - 1) & 7, bits)
    else:
        words = torch.from_numpy((packed(zeros, bits).numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    stored = {"qweight": packed(values, bits).t(), "qzeros": words, "scales": torch.ones(1, rows)}
    save_sharded(tmp_path, {f"{layer}.{key}": tensor.contiguous() for key, tensor in stored.items()})
    form = read_format(ConfigReader({"quantization_config": GPTQ | {"bits": bits, "sym": False}}))
    assert form is not None
    weight = QuantizedCheckpoint(tmp_path, torch.float32, lambda _: None, form).linear(layer, (rows, columns))
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize(), torch.from_numpy(values - zeros.T).float())


def test_what_autoround_writes_about_its_making_is_no_obstacle() -> None:
    """Intel's checkpoints in GPTQ's format."""
    made = {
        "provider": "auto-round", "autoround_version": "0.4.0", "data_type": "int", "scale_dtype": "torch.float16",
        "iters": 200, "lr": 0.005, "minmax_lr": 0.005, "nsamples": 128, "seqlen": 2048, "batch_size": 8, "amp": True,
        "gradient_accumulate_steps": 1, "enable_minmax_tuning": True, "enable_norm_bias_tuning": False,
        "enable_quanted_input": True, "low_gpu_mem_usage": True, "to_quant_block_names": None, "true_sequential": False,
    }  # fmt: skip
    assert read_format(ConfigReader({"quantization_config": GPTQ | made})) is not None
    with pytest.raises(ModelLoadError, match=r"quantization_config\.data_type must be one of int"):
        read_format(ConfigReader({"quantization_config": GPTQ | made | {"data_type": "mx_fp"}}))


def test_experts_in_four_bits(tmp_path: Path) -> None:
    """Each expert's layers are stored by themselves, as those of a dense model are; the router is plain."""
    torch.manual_seed(8)
    config = transformers.Qwen3MoeConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    plain, quantized, writer = tmp_path / "plain", tmp_path / "quantized", GptqWriter(GPTQ)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(plain)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            stored[name] = tensor
            continue
        parts, tensors[name] = writer(layer, tensor)
        stored |= {f"{layer}.{key}": part for key, part in parts.items() if key != "bias"}
    assert any(".experts.3.down_proj.qweight" in name for name in stored)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantized.mkdir()
    save_sharded(quantized, {name: tensor.contiguous() for name, tensor in stored.items()})
    described = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(described | {"quantization_config": GPTQ}))
    worker, _ = load(quantized)
    check_tokens(transformers.Qwen3MoeForCausalLM.from_pretrained(plain).eval(), tokens_of(worker))
    worker.close()
