"""Settings from the files of models that the package `transformers` runs. Sources are those of dense.py."""

from troupellm.models.config.gguf_dense import Config, decoder, layer_kinds
from troupellm.models.config.gguf_metadata import Metadata

LAYER_NORM = ("layer_norm_eps", "attention.layer_norm_epsilon")
"""config.json's key and the file's of norms that take off the mean."""


def command_r(file: Metadata) -> Config:
    found = decoder(file, "CohereForCausalLM", "cohere", norm=LAYER_NORM)
    normed = file.has_tensor("blk.0.attn_q_norm.weight")
    return found | {"use_qk_norm": normed, "logit_scale": file.reader.number("logit_scale")}


def cohere2(file: Metadata) -> Config:
    """Layers without a window are not rotated either."""
    found = decoder(file, "Cohere2ForCausalLM", "cohere2", norm=LAYER_NORM)
    scale = {"logit_scale": file.reader.number("logit_scale")}
    return found | layer_kinds(file, found["num_hidden_layers"], 4) | scale


def hunyuan_dense(file: Metadata) -> Config:
    """`rope.freq_base` has its scaling in it."""
    return decoder(file, "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")
