"""Settings from the files of models that the package `transformers` runs. Sources are those of dense.py."""

from troupellm.models.config.gguf_dense import LAYER_NORM, Config, decoder
from troupellm.models.config.gguf_metadata import Metadata


def command_r(file: Metadata) -> Config:
    found = decoder(file, "CohereForCausalLM", "cohere", norm=LAYER_NORM)
    normed = file.has_tensor("blk.0.attn_q_norm.weight")
    return found | {"use_qk_norm": normed, "logit_scale": file.reader.number("logit_scale")}


def hunyuan_dense(file: Metadata) -> Config:
    """`rope.freq_base` has its scaling in it."""
    return decoder(file, "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")
