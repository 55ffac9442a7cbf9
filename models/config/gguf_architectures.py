"""The architectures of GGUF files that are read: keys, names of tensors, and how those are stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from troupellm.models.config import gguf_by_transformers, gguf_dense, gguf_sparse
from troupellm.models.config.gguf_metadata import Metadata

_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_GEMMA2 = _BEHIND | {"pre_feedforward_layernorm": "ffn_norm"}
_GLM4 = {
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip
_GPT_OSS = {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
_DEEPSEEK = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
_LFM2 = {
    "model.norm": "token_embd_norm", "operator_norm": "attn_norm", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj", "conv.conv": "shortconv.conv",
}  # fmt: skip
_HUNYUAN = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the files of one value of `general.architecture` are read.

    Attributes:
        config: config.json from the metadata.
        names: of tensors, mostly within a layer, beside and instead of the usual ones.
        turned: rows of queries and keys are stored for rotations of neighbours instead of halves.
        norm_offset: number that was added to every norm's weight.
    """

    config: Callable[[Metadata], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)
    turned: bool = False
    norm_offset: float = 0.0


ARCHITECTURES = {
    "llama": Architecture(gguf_dense.llama, turned=True),
    "qwen2": Architecture(gguf_dense.qwen2),
    "qwen3": Architecture(gguf_dense.qwen3),
    "qwen2moe": Architecture(gguf_sparse.qwen2moe),
    "qwen3moe": Architecture(gguf_sparse.qwen3moe),
    "gemma2": Architecture(gguf_dense.gemma2, _GEMMA2, norm_offset=1.0),
    "gemma3": Architecture(gguf_dense.gemma3, _GEMMA2, norm_offset=1.0),
    "phi3": Architecture(gguf_dense.phi3, {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}),
    "granite": Architecture(gguf_dense.granite, turned=True),
    "smollm3": Architecture(gguf_dense.smollm3, turned=True),
    "olmo2": Architecture(gguf_dense.olmo2, _BEHIND),
    "glm4": Architecture(gguf_dense.glm4, _GLM4),
    "gpt-oss": Architecture(gguf_sparse.gpt_oss, _GPT_OSS),
    "deepseek2": Architecture(gguf_sparse.deepseek2, _DEEPSEEK),
    "gemma": Architecture(gguf_dense.gemma, norm_offset=1.0),
    "command-r": Architecture(gguf_by_transformers.command_r),
    "cohere2": Architecture(gguf_dense.cohere2),
    "exaone4": Architecture(gguf_dense.exaone4, _BEHIND),
    "ernie4_5": Architecture(gguf_dense.ernie4_5),
    "hunyuan-dense": Architecture(gguf_by_transformers.hunyuan_dense, _HUNYUAN),
    "seed_oss": Architecture(gguf_dense.seed_oss, {"post_attention_layernorm": "post_attention_norm"}),
    "lfm2": Architecture(gguf_dense.lfm2, _LFM2),
    "minimax-m2": Architecture(gguf_sparse.minimax_m2),
}
"""Architectures by `general.architecture`."""
