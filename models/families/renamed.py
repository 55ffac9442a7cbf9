"""Decoders of other families under names of their own: of keys in config.json, of tensors, and of the rows within them.

InternLM 2, EXAONE 3, Baichuan and Baichuan 2 with rotations, ChatGLM 3 and the first files of GLM-4, MiniCPM.
"""

import math
from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, architecture_of
from troupellm.models.families import glm, llama

Pairs = tuple[tuple[str, str], ...]
KEYS: dict[str, Pairs] = {
    # key of the published config.json, and its usual name
    "InternLM2": (("bias", "attention_bias"),),
    "Exaone": (
        ("num_layers", "num_hidden_layers"), ("layer_norm_epsilon", "rms_norm_eps"),
        ("activation_function", "hidden_act"),
    ),
    "ChatGLM": (
        ("num_layers", "num_hidden_layers"), ("ffn_hidden_size", "intermediate_size"), ("kv_channels", "head_dim"),
        ("layernorm_epsilon", "rms_norm_eps"), ("padded_vocab_size", "vocab_size"), ("add_qkv_bias", "attention_bias"),
        ("seq_length", "max_position_embeddings"),
    ),
}  # fmt: skip
TENSORS: dict[str, Pairs] = {
    # parts of the usual names, and what is stored
    "InternLM2": (
        ("embed_tokens", "tok_embeddings"), (".self_attn.qkv_proj", ".attention.wqkv"),
        (".self_attn.o_proj", ".attention.wo"), (".mlp.gate_proj", ".feed_forward.w1"),
        (".mlp.up_proj", ".feed_forward.w3"), (".mlp.down_proj", ".feed_forward.w2"),
        (".input_layernorm", ".attention_norm"), (".post_attention_layernorm", ".ffn_norm"), ("lm_head", "output"),
    ),
    "Exaone": (
        ("model.embed_tokens", "transformer.wte"), ("model.layers.", "transformer.h."),
        ("model.norm", "transformer.ln_f"), (".self_attn.o_proj", ".attn.attention.out_proj"),
        (".self_attn.", ".attn.attention."), (".mlp.gate_proj", ".mlp.c_fc_0"), (".mlp.up_proj", ".mlp.c_fc_1"),
        (".mlp.down_proj", ".mlp.c_proj"), (".input_layernorm", ".ln_1"), (".post_attention_layernorm", ".ln_2"),
    ),
    "Baichuan": ((".self_attn.qkv_proj", ".self_attn.W_pack"),),
    "ChatGLM": (
        ("model.embed_tokens", "transformer.embedding.word_embeddings"),
        ("model.layers.", "transformer.encoder.layers."), ("model.norm", "transformer.encoder.final_layernorm"),
        (".self_attn.qkv_proj", ".self_attention.query_key_value"), (".self_attn.o_proj", ".self_attention.dense"),
        (".mlp.gate_up_proj", ".mlp.dense_h_to_4h"), (".mlp.down_proj", ".mlp.dense_4h_to_h"),
        ("lm_head", "transformer.output_layer"),
    ),
}  # fmt: skip
ARCHITECTURES = (
    "InternLM2ForCausalLM", "ExaoneForCausalLM", "BaichuanForCausalLM", "BaiChuanForCausalLM", "ChatGLMModel",
    "ChatGLMForConditionalGeneration", "MiniCPMForCausalLM",
)  # fmt: skip
BARE = ("InternLM2Model",)
CLASSIFIERS = ("InternLM2ForSequenceClassification", "MiniCPMForSequenceClassification")
NORMED_HEADS = 125696
"""Vocabulary of Baichuan 2, whose head has rows of length 1 wherever it is used."""
CHATGLM: dict[str, bool] = {
    "add_bias_linear": False, "rmsnorm": True, "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True, "original_rope": True, "multi_query_attention": True,
}  # fmt: skip
"""The only values that are built."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from the config.json of these families."""
    architecture = architecture_of(reader)
    kind = next((name for name in TENSORS if architecture.lower().startswith(name.lower())), "MiniCPM")
    moved = {usual: reader.values[key] for key, usual in KEYS.get(kind, ()) if reader.has(key)}
    reader = reader.with_defaults(**moved)
    plain = {"ChatGLM": _chatglm, "Baichuan": _baichuan, "MiniCPM": _minicpm}.get(kind, llama.describe)(reader)
    grouped: dict[str, Any] = {}
    if kind == "InternLM2":
        grouped = {"qkv_name": "qkv_proj", "qkv_by_group": True}
    return msgspec.structs.replace(plain, renamed=TENSORS.get(kind, ()), **grouped)


def _chatglm(reader: ConfigReader) -> DecoderConfig:
    for key, value in CHATGLM.items():
        if reader.flag(key, value) != value:
            raise reader.refuse(key, f"must be {str(value).lower()}")
    plain = glm.describe(
        reader.with_values(
            num_key_value_heads=reader.integer("multi_query_group_num"),
            rope_theta=10000.0 * reader.number("rope_ratio", 1.0),
        )
    )
    return msgspec.structs.replace(plain, qkv_name="qkv_proj")


def _baichuan(reader: ConfigReader) -> DecoderConfig:
    if reader.integer("hidden_size") == 5120:
        raise reader.refuse("hidden_size", "must be 4096: models with 5120 add a bias by distance, which is not built")
    plain = llama.describe(reader)
    return msgspec.structs.replace(plain, qkv_name="qkv_proj", head_normed=plain.vocab_size == NORMED_HEADS)


def _minicpm(reader: ConfigReader) -> DecoderConfig:
    """Granite's factors, under other keys."""
    for key in ("num_experts", "sparse_config"):
        if reader.is_on(key):
            raise reader.refuse(key, "must be missing: this is not built")
    plain = llama.describe(reader.with_defaults(tie_word_embeddings=True))
    return msgspec.structs.replace(
        plain,
        embedding_scale=reader.number("scale_emb", 1.0),
        residual_multiplier=reader.number("scale_depth", 1.0) / math.sqrt(plain.num_layers),
        logit_scale=reader.number("dim_model_base", 1.0) / plain.hidden_size,
    )
