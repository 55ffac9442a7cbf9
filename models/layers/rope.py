"""Cosine and sine tables of rotary position embeddings, with the common ways to stretch them."""

import math

import torch
from torch import Tensor

from troupellm.models.config.decoder_config import LayerShape, RopeConfig


def rope_tables(config: RopeConfig, head_dim: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables for positions 0 to `length` - 1.

    Two kinds depend on how long a sequence may get: `dynamic` stretches to `length` when that is beyond the trained
    length, and `longrope` then takes its long factors. One served length means one table, so that cached keys stay
    valid as a sequence grows.

    Returns:
        cos and sin, [length, 1, head_dim / 2], computed in float32.
    """
    frequencies, amplitude = rope_frequencies(config, head_dim, length)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * amplitude).to(dtype)[:, None], (angles.sin() * amplitude).to(dtype)[:, None]


def rotation_of(shape: LayerShape) -> tuple[RopeConfig, int] | None:
    """A layer's rotation and how many values of a head it turns; None if it turns none."""
    return None if shape.rope is None else (shape.rope, shape.rotary_dim or shape.head_dim)


def rope_frequencies(config: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Radians per position, float32 [head_dim / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / torch.pow(config.theta, exponents)
    match config.kind:
        case "linear":
            return plain / config.factor, 1.0
        case "dynamic":
            return _dynamic(config, head_dim, length, exponents), 1.0
        case "llama3":
            return _llama3(config, plain), 1.0
        case "yarn":
            return _yarn(config, head_dim, plain), _yarn_amplitude(config)
        case "proportional":
            count = int(config.turning * head_dim // 2)
            return torch.cat((plain[:count], torch.zeros(head_dim // 2 - count))) / config.factor, 1.0
        case "longrope":
            factors = config.long_factor if length > config.original_max_position else config.short_factor
            return plain / torch.tensor(factors, dtype=torch.float32), _longrope_amplitude(config)
        case _:
            return plain, 1.0


def length_matters(config: RopeConfig, length: int) -> int:
    """The part of a served length that the frequencies depend on. Lengths with equal numbers have equal tables, as far
    as both reach."""
    match config.kind:
        case "dynamic":
            return max(length, config.original_max_position)
        case "longrope":
            return int(length > config.original_max_position)
        case _:
            return 0


def _dynamic(config: RopeConfig, head_dim: int, length: int, exponents: Tensor) -> Tensor:
    """The base grows with the length beyond the trained one (NTK-aware)."""
    stretch = config.factor * max(length, config.original_max_position) / config.original_max_position
    base = config.theta * (stretch - (config.factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / torch.pow(base, exponents)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    turns = config.original_max_position * plain / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * (1 - kept) + plain * kept


def _yarn(config: RopeConfig, head_dim: int, plain: Tensor) -> Tensor:
    """As llama3, but the blend is linear in the index of the frequency."""

    def index(turns: float) -> float:
        """The dimension whose wave makes this many turns over the trained length."""
        ratio = config.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = index(config.beta_fast), index(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * slowed + plain * (1 - slowed)


def _yarn_amplitude(config: RopeConfig) -> float:
    def amplitude(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    # `transformers` ignores attn_factor; its publishers, and the servers that they name, multiply by it.
    if config.mscale and config.mscale_all_dim:
        return config.yarn_attn_factor * amplitude(config.mscale) / amplitude(config.mscale_all_dim)
    return config.yarn_attn_factor * amplitude(1.0)


def _longrope_amplitude(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))
