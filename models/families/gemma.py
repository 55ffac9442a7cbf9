"""Gemma: Llama with a GELU in its gate, norms that leave out one, and embeddings that are scaled up."""

from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.families.gemma2 import refuse_both_directions

ARCHITECTURES = ("GemmaForCausalLM",)
DEFAULTS: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
"""Values that the reference implementation assumes where config.json has none."""
GELU = ("gelu_pytorch_tanh", "gelu")
"""The second is what the first files say; they mean the first as well."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    refuse_both_directions(reader)
    reader.choice("hidden_activation" if reader.is_on("hidden_activation") else "hidden_act", GELU)
    bias = reader.flag("attention_bias", False)
    plain = decoder_config(reader, qkv_bias=bias, out_bias=bias, activation="gelu_tanh")
    return msgspec.structs.replace(plain, norm_offset=1.0, embedding_scale=plain.hidden_size**0.5)
