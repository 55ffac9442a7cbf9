"""The rotation that a GGUF file describes, as `rope_parameters` of config.json."""

import math
from typing import Any

from troupellm.models.config.gguf_metadata import Metadata

FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ALL_FACTORS = frozenset({FACTORS, LONG_FACTORS, SHORT_FACTORS})


def rope_parameters(file: Metadata, rotary: int) -> dict[str, Any]:
    """The scaling that keys name, or divisors of the frequencies in a tensor (as of Llama 3.1).

    Args:
        rotary: values of a head that are rotated.

    Raises:
        ModelLoadError: a value or a tensor is missing or wrong.
    """
    reader = file.reader
    rope: dict[str, Any] = {"rope_theta": reader.number("rope.freq_base", 10000.0)}
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    kind = reader.choice("rope.scaling.type", ("none", "linear", "yarn"), "none" if factor == 1.0 else "linear")
    if file.has_tensor(FACTORS):
        if kind != "none":
            raise reader.refuse("rope.scaling.type", f"must be none beside tensor {FACTORS}")
        factors = file.numbers(FACTORS, rotary // 2)
        return rope | _longrope(file, factors, factors, reader.integer("context_length")) | {"attention_factor": 1.0}
    if kind == "none":
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    return rope | _yarn(file, factor) if kind == "yarn" else rope


def stretched_rope(file: Metadata, rotary: int) -> dict[str, Any]:
    """As `rope_parameters`, of Phi-3: two tensors with divisors, for short and for long contexts."""
    if not file.has_tensor(LONG_FACTORS):
        return rope_parameters(file, rotary)
    reader = file.reader
    reader.choice("rope.scaling.type", ("none", "longrope"), "longrope")
    short, long = file.numbers(SHORT_FACTORS, rotary // 2), file.numbers(LONG_FACTORS, rotary // 2)
    rope = _longrope(file, short, long, reader.integer("rope.scaling.original_context_length"))
    if reader.has("rope.scaling.attn_factor"):
        rope["attention_factor"] = reader.number("rope.scaling.attn_factor")
    return {"rope_theta": reader.number("rope.freq_base", 10000.0), **rope}


def _longrope(file: Metadata, short: list[float], long: list[float], original: int) -> dict[str, Any]:
    longest = file.reader.integer("context_length")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": longest / original,
        "original_max_position_embeddings": original,
    }


def _yarn(file: Metadata, factor: float) -> dict[str, Any]:
    """Raises ModelLoadError for an amplitude of its own: converters write two different things there."""
    reader = file.reader
    usual = 0.1 * math.log(max(factor, 1.0)) + 1.0
    for key, allowed in (("rope.scaling.yarn_attn_factor", (1.0, usual)), ("rope.scaling.yarn_ext_factor", (1.0,))):
        value = reader.number(key, 1.0)
        if not any(math.isclose(value, number, rel_tol=1e-4) for number in allowed):
            raise reader.refuse(key, f"must be {' or '.join(f'{number:.4f}' for number in allowed)}")
    longest = reader.integer("context_length")
    return {
        "original_max_position_embeddings": reader.integer("rope.scaling.original_context_length", longest),
        "beta_fast": reader.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": reader.number("rope.scaling.yarn_beta_slow", 1.0),
    }
