"""Settings from the files of models that the package `transformers` runs. Sources are those of dense.py."""

from troupellm.models.config.gguf_dense import Config, decoder, layer_kinds
from troupellm.models.config.gguf_metadata import Metadata
from troupellm.models.config.gguf_sparse import SIGMOID

LAYER_NORM = ("layer_norm_eps", "attention.layer_norm_epsilon")
"""config.json's key and the file's of norms that take off the mean."""


def gemma(file: Metadata) -> Config:
    return decoder(file, "GemmaForCausalLM", "gemma")


def command_r(file: Metadata) -> Config:
    found = decoder(file, "CohereForCausalLM", "cohere", norm=LAYER_NORM)
    normed = file.has_tensor("blk.0.attn_q_norm.weight")
    return found | {"use_qk_norm": normed, "logit_scale": file.reader.number("logit_scale")}


def cohere2(file: Metadata) -> Config:
    """Layers without a window are not rotated either."""
    found = decoder(file, "Cohere2ForCausalLM", "cohere2", norm=LAYER_NORM)
    scale = {"logit_scale": file.reader.number("logit_scale")}
    return found | layer_kinds(file, found["num_hidden_layers"], 4) | scale


def exaone4(file: Metadata) -> Config:
    """If some layers have a window, the others are not rotated."""
    found = decoder(file, "Exaone4ForCausalLM", "exaone4")
    return found | layer_kinds(file, found["num_hidden_layers"], 4)


def ernie4_5(file: Metadata) -> Config:
    return decoder(file, "Ernie4_5ForCausalLM", "ernie4_5") | {"use_bias": file.has_tensor("blk.0.attn_q.bias")}


def hunyuan_dense(file: Metadata) -> Config:
    """`rope.freq_base` has its scaling in it."""
    return decoder(file, "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")


def seed_oss(file: Metadata) -> Config:
    found = decoder(file, "SeedOssForCausalLM", "seed_oss")
    return found | {"attention_out_bias": file.has_tensor("blk.0.attn_output.bias")}


def minimax_m2(file: Metadata) -> Config:
    """Raises ModelLoadError for experts that are not scored by sigmoids."""
    reader = file.reader
    if reader.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise reader.refuse("expert_gating_func", f"must be {SIGMOID} (sigmoid)")
    return decoder(file, "MiniMaxM2ForCausalLM", "minimax_m2", partial=True) | {
        "intermediate_size": reader.integer("expert_feed_forward_length"),
        "num_local_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
    }
