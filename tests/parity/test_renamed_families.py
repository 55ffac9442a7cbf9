"""Models whose publishers have names of their own for what Llama, GLM, Granite and Qwen2 compute: the logits of
`transformers` on the usual names, from a file that was written as the publishers write it.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import LLAMA3, SIZES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.watched_logits import watched_logits

FILE, CONFIG = "model.safetensors", "config.json"
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
QKV = ("q_proj", "k_proj", "v_proj")
Tensors = dict[str, torch.Tensor]
PLAIN = {**SIZES, "tie_word_embeddings": False}
GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / math.sqrt(2), "attention_multiplier": HEAD_DIM**-0.5,
    "logits_scaling": 64 / 16,
}  # fmt: skip


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Queries, keys, values."""
    return torch.cat(parts)


def by_group(parts: list[torch.Tensor]) -> torch.Tensor:
    """Per head of the keys its queries, its key and its value."""
    query, key, value = (part.unflatten(0, (KV_HEADS, -1)) for part in parts)
    return torch.cat((query, key, value), dim=1).flatten(0, 1)


class Published(NamedTuple):
    """A publisher's names."""

    usual: Callable[[], transformers.PretrainedConfig]
    """The model in `transformers`."""
    file: dict[str, Any]
    """The published config.json, beside and instead of the usual keys; None takes one out."""
    outer: dict[str, str] = {}  # noqa: RUF012
    layers: str = "model.layers."
    layer: dict[str, str] = {}  # noqa: RUF012
    merged: str = ""
    """The name of queries, keys and values in one tensor."""
    join: Callable[[list[torch.Tensor]], torch.Tensor] = in_order
    extra: Tensors = {}  # noqa: RUF012


INTERNLM = {
    "outer": {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output"},
    "layer": {
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    },
    "merged": "attention.wqkv", "join": by_group,
}  # fmt: skip
INTERNLM_FILE: dict[str, Any] = {
    "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False, "attention_bias": None,
    "auto_map": {"AutoModel": "modeling_internlm2.InternLM2ForCausalLM"},
}  # fmt: skip
PUBLISHED: dict[str, Published] = {
    "internlm2": Published(lambda: transformers.LlamaConfig(**PLAIN), INTERNLM_FILE, **INTERNLM),
    "internlm2 with biases": Published(
        lambda: transformers.LlamaConfig(**PLAIN, attention_bias=True), {**INTERNLM_FILE, "bias": True}, **INTERNLM
    ),
    "exaone3": Published(
        lambda: transformers.LlamaConfig(**PLAIN, rope_parameters=LLAMA3),
        {
            "architectures": ["ExaoneForCausalLM"],
            "model_type": "exaone",
            "num_layers": 2,
            "num_hidden_layers": None,
            "layer_norm_epsilon": 1e-6,
            "rms_norm_eps": None,
            "activation_function": "silu",
            "hidden_act": None,
        },
        {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
        "transformer.h.",
        {
            "self_attn.q_proj": "attn.attention.q_proj",
            "self_attn.k_proj": "attn.attention.k_proj",
            "self_attn.v_proj": "attn.attention.v_proj",
            "self_attn.o_proj": "attn.attention.out_proj",
            "mlp.gate_proj": "mlp.c_fc_0",
            "mlp.up_proj": "mlp.c_fc_1",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
        extra={"transformer.h.0.attn.attention.rotary.inv_freq": torch.ones(8)},
    ),
    "baichuan": Published(
        lambda: transformers.LlamaConfig(**PLAIN | {"num_key_value_heads": HEADS}),
        {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "num_key_value_heads": None},
        merged="self_attn.W_pack",
    ),
    "baichuan2": Published(
        lambda: transformers.LlamaConfig(**PLAIN | {"num_key_value_heads": HEADS, "vocab_size": 125696}),
        {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "num_key_value_heads": None},
        merged="self_attn.W_pack",
    ),
    "chatglm": Published(
        lambda: transformers.GlmConfig(
            **PLAIN,
            head_dim=32,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        ),
        {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "num_layers": 2,
            "num_hidden_layers": None,
            "ffn_hidden_size": 112,
            "intermediate_size": None,
            "kv_channels": 32,
            "head_dim": None,
            "layernorm_epsilon": 1e-5,
            "rms_norm_eps": None,
            "padded_vocab_size": 300,
            "vocab_size": None,
            "seq_length": 256,
            "max_position_embeddings": None,
            "add_qkv_bias": True,
            "attention_bias": None,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "num_key_value_heads": None,
            "rope_ratio": 500,
            "rope_parameters": None,
            "rmsnorm": True,
            "original_rope": True,
            "post_layer_norm": True,
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
        },
        {
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "lm_head": "transformer.output_layer",
            "model.norm": "transformer.encoder.final_layernorm",
        },
        "transformer.encoder.layers.",
        {
            "self_attn.o_proj": "self_attention.dense",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        "self_attention.query_key_value",
        extra={"transformer.rotary_pos_emb.inv_freq": torch.ones(8)},
    ),
    "minicpm": Published(
        lambda: transformers.GraniteConfig(**PLAIN, **GRANITE),
        {
            "architectures": ["MiniCPMForCausalLM"],
            "model_type": "minicpm",
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 16,
            **dict.fromkeys(GRANITE),
        },
    ),
    "mimo": Published(
        lambda: transformers.Qwen2Config(**PLAIN),
        {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
        extra={"model.mtp_layers.0.input_proj.weight": torch.ones(64, 128)},
    ),
}


def written(folder: Path, name: str) -> Pair:
    """The checkpoint as it is published, beside the reference."""
    rows = PUBLISHED[name]
    pair = Pair(folder, rows.usual())
    head = pair.reference.lm_head.weight
    if name == "baichuan2":  # its own code divides the head's rows by their lengths
        head.data = torch.nn.functional.normalize(head.data)
    save_file(renamed(load_file(folder / FILE), rows) | rows.extra, folder / FILE)
    config = {**json.loads((folder / CONFIG).read_text()), **rows.file}
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    pair.open()
    return pair


def renamed(tensors: Tensors, rows: Published) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        if inner is None:
            found[f"{rows.outer.get(stem, stem)}.{last}"] = tensor
        elif not rows.merged or not stem.endswith(QKV):
            found[f"{rows.layers}{inner[1]}.{rows.layer.get(inner[2], inner[2])}.{last}"] = tensor
        elif stem.endswith(QKV[0]):
            parts = [tensors[f"model.layers.{inner[1]}.self_attn.{part}.{last}"] for part in QKV]
            found[f"{rows.layers}{inner[1]}.{rows.merged}.{last}"] = rows.join(parts)
    return found


NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "baichuan2" else ()) for name in PUBLISHED]
"""The slow one has a vocabulary of its real size, by which it is known."""


@pytest.mark.parametrize("name", NAMES)
def test_a_model_under_its_publishers_names_is_the_usual_one(name: str, tmp_path: Path) -> None:
    pair, prompt = written(tmp_path, name), make_prompt(45)
    driver = Driver(pair.runner())
    driver.submit(0, prompt)
    with watched_logits(driver.runner) as seen:
        driver.run({0: 7})
        driver.run({0: 38})
        driver.generate(0, 4)
    expected = pair.logits(driver.tokens[0])[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("internlm2", {"qkv_by_group": False}),
        pytest.param("baichuan2", {"head_normed": False}, marks=pytest.mark.slow),
        ("minicpm", {"logit_scale": 1.0}),
        ("minicpm", {"embedding_scale": 1.0}), ("minicpm", {"residual_multiplier": 1.0}),
        ("chatglm", {"rope_interleaved": False}),
    ],
)  # fmt: skip
def test_each_difference_matters(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    pair, prompt = written(tmp_path, name), make_prompt(30)
    wrong = pair.mistaken(**changes).own_logits(prompt)
    assert (wrong - pair.own_logits(prompt)).abs().max() > 0.01


def test_internlm2_is_found_within_a_model_that_sees(tmp_path: Path) -> None:
    """InternVL 2, whose text part has the publisher's names below its own prefix."""
    pair = written(tmp_path, "internlm2")
    expected = pair.own_logits(make_prompt(30))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / FILE).items()}
    save_file(
        tensors | {"vision_model.embeddings.weight": torch.ones(2), "mlp1.0.bias": torch.ones(2)}, tmp_path / FILE
    )
    section = json.loads((tmp_path / CONFIG).read_text())
    file = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": section}
    (tmp_path / CONFIG).write_text(json.dumps(file))
    pair.open()
    assert torch.equal(pair.own_logits(make_prompt(30)), expected)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("baichuan", {"hidden_size": 5120}, "hidden_size must be 4096"),
        ("chatglm", {"add_bias_linear": True}, "add_bias_linear must be false, got true"),
        ("chatglm", {"rmsnorm": False}, "rmsnorm must be true, got false"),
        ("minicpm", {"num_experts": 8}, "num_experts must be missing"),
        ("minicpm", {"sparse_config": {"kernel_size": 32}}, "sparse_config must be missing"),
    ],
)
def test_another_computation_is_refused_by_key(name: str, changes: dict[str, Any], message: str) -> None:
    rows = PUBLISHED[name]
    values = {**rows.usual().to_dict(), **rows.file, **changes}
    with pytest.raises(ModelLoadError, match=message):
        describe_decoder(ConfigReader({key: value for key, value in values.items() if value is not None}))
