"""Names of tensors: from Hugging Face's format to GGUF's (gguf-py/gguf/constants.py in llama.cpp)."""

import re
from collections.abc import Mapping
from typing import NamedTuple

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
"""Within a layer, without .weight and .bias."""
_WHOLE = {
    "self_attn.sinks": "attn_sinks.weight", "mlp.experts.gate_proj_bias": "ffn_gate_exps.bias",
    "mlp.experts.up_proj_bias": "ffn_up_exps.bias", "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias", "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight", "mlp.experts.gate_proj": "ffn_gate_exps.weight",
    "mlp.experts.up_proj": "ffn_up_exps.weight", "mlp.experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
"""Within a layer, of names that do not end so."""
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_PREFIX = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)\.(weight|bias)")


class Place(NamedTuple):
    """The place of a weight: a tensor, and an expert in it."""

    tensor: str
    expert: int | None = None
    """Its number in a tensor that holds all experts of a layer; None is the whole tensor."""
    older: str = ""
    """The expert's own tensor, in files from before all experts shared one."""


def place_of(name: str, own: Mapping[str, str]) -> Place:
    """The place of a tensor of Hugging Face's format.

    Args:
        own: names of its architecture, beside and instead of the usual ones.
    """
    name = name.replace(".block_sparse_moe.", ".mlp.", 1)
    layer = _PREFIX.match(name)
    if layer is None:
        outer, _, last = name.rpartition(".")
        return Place(f"{own.get(outer) or _OUTER.get(outer, outer)}.{last}")
    block, inner = f"blk.{layer[1]}", name[layer.end() :]
    if inner in _WHOLE:
        return Place(f"{block}.{_WHOLE[inner]}")
    if (expert := _EXPERT.fullmatch(inner)) is not None and expert[2] in _PARTS:
        part = f"{block}.ffn_{_PARTS[expert[2]]}"
        return Place(f"{part}_exps.{expert[3]}", int(expert[1]), f"{part}.{expert[1]}.{expert[3]}")
    stem, _, last = inner.rpartition(".")
    return Place(f"{block}.{own.get(stem) or _LAYER.get(stem, stem)}.{last}")


def block_prefix(prefix: str) -> str:
    """The beginning of names that begin with a layer's, or the text as it is."""
    return _PREFIX.sub(r"blk.\1.", prefix)
