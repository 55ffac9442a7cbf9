"""Weights of root-mean-square norms."""

from torch import Tensor

from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig


def take_norm(config: DecoderConfig, source: WeightSource, name: str, size: int) -> Tensor:
    """A norm's weight [size], with the offset that some families leave out of the checkpoint.

    The sum is float32 for any dtype of the model: added to the offset, a small weight would lose most of its bits.
    """
    weight = source.take(f"{name}.weight", (size,))
    return weight.float() + config.norm_offset if config.norm_offset else weight
