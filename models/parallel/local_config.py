"""One rank's part of a decoder, as the description of a smaller decoder: today's layers are built from it unchanged.

Megatron-LM (Shoeybi et al., 2019): attention is divided by heads, the feed-forward part by its inner numbers.
"""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerShape, MoeConfig
from troupellm.protocol.errors import ConfigError

PARAM = "tensor_parallel_size"


def local_config(model: DecoderConfig, size: int) -> DecoderConfig:
    """The layers of one of `size` ranks. Vocabulary and hidden size stay those of the model."""
    layers = tuple(
        msgspec.structs.replace(
            shape,
            num_heads=shape.num_heads // size,
            num_kv_heads=max(1, shape.num_kv_heads // size),
            intermediate_size=shape.intermediate_size // size,
            experts=None if shape.experts is None else _local_experts(shape.experts, size),
        )
        for shape in model.layers
    )
    return msgspec.structs.replace(model, layers=layers)


def _local_experts(experts: MoeConfig, size: int) -> MoeConfig:
    """Every rank has a part of each expert."""
    inner, shared = experts.intermediate_size // size, experts.shared_size // size
    return msgspec.structs.replace(experts, intermediate_size=inner, shared_size=shared)


def check_divides(model: DecoderConfig, size: int) -> None:
    """
    Raises:
        ConfigError: so many ranks cannot share the model's layers; the text names the numbers that can.
    """
    fitting = [number for number in range(1, _most(model) + 1) if _divides(model, number)]
    if size in fitting:
        return
    widest = max(model.layers, key=lambda shape: shape.num_heads)
    inner = widest.intermediate_size if widest.experts is None else widest.experts.intermediate_size
    text = f"{widest.num_heads} heads, {widest.num_kv_heads} KV heads, intermediate size {inner}"
    raise ConfigError(
        f"{PARAM} {size} does not divide the model's layers ({text}): tensor parallel {', '.join(map(str, fitting))}",
        param=PARAM,
    )


def _most(model: DecoderConfig) -> int:
    return min(shape.num_heads for shape in model.layers)


def _divides(model: DecoderConfig, size: int) -> bool:
    return all(_divides_layer(model, shape, size) for shape in model.layers)


def _divides_layer(model: DecoderConfig, shape: LayerShape, size: int) -> bool:
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    grouped = model.qkv_by_group and kv_heads > 1  # then a rank reads whole groups
    by_heads = heads % size == 0 and (kv_heads % size == 0 or (size % kv_heads == 0 and not grouped))
    inner = (
        (shape.intermediate_size,)
        if shape.experts is None
        else (shape.experts.intermediate_size, shape.experts.shared_size)
    )
    return by_heads and not any(width % size for width in inner)


def head_widths(vocab_size: int, size: int) -> tuple[int, ...]:
    """Rows of the head that each rank has."""
    return tuple(vocab_size * (rank + 1) // size - vocab_size * rank // size for rank in range(size))
