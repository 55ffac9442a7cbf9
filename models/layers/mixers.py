"""The part of each layer that mixes a token with those before it."""

from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.attention import Attention, SelfAttention
from troupellm.models.layers.gated_attention import GatedAttention
from troupellm.models.layers.gated_delta import GatedDelta
from troupellm.models.layers.mla import LatentAttention
from troupellm.models.layers.short_conv import ShortConv
from troupellm.models.layers.ssd import Ssd


def make_mixer(config: DecoderConfig, layer: int, source: WeightSource) -> SelfAttention:
    """The attention of one layer, or what it has in its place, with its weights taken from `source`."""
    prefix = f"model.layers.{layer}"
    if config.layers[layer].mixer == "short_conv":
        assert config.short_conv is not None
        return ShortConv(config, config.short_conv, f"{prefix}.conv", source)
    if config.layers[layer].mixer == "gated_delta":
        assert config.gated_delta is not None
        return GatedDelta(config, config.gated_delta, f"{prefix}.linear_attn", source)
    if config.layers[layer].mixer == "ssd":
        assert config.ssd is not None
        return Ssd(config, config.ssd, f"{prefix}.mamba", source)
    if config.attention_gate:
        return GatedAttention(config, layer, f"{prefix}.self_attn", source)
    if config.mla is not None:
        return LatentAttention(config, config.mla, layer, f"{prefix}.self_attn", source)
    return Attention(config, layer, f"{prefix}.self_attn", source)
