"""Keys of config.json that models with state-space layers share."""

import math

from troupellm.models.config.hf_config import ConfigReader

INFINITY = {"__float__": "Infinity"}
"""The number as `transformers` writes it."""


def step_limits(reader: ConfigReader) -> tuple[float, float]:
    """The least and the largest step of a state, from `time_step_limit`.

    Raises:
        ModelLoadError: these are not two numbers.
    """
    limits = reader.values.get("time_step_limit") or [0.0, INFINITY]
    if isinstance(limits, list):
        limits = [math.inf if limit == INFINITY else limit for limit in limits]
    if not isinstance(limits, list) or [type(limit) in (int, float) for limit in limits] != [True, True]:
        raise reader.refuse("time_step_limit", "must be two numbers")
    return float(limits[0]), float(limits[1])


def groups_of(reader: ConfigReader, key: str, default: int, heads_key: str, heads: int) -> int:
    """The number of equal groups of heads.

    Raises:
        ModelLoadError: the heads have no such groups.
    """
    groups = reader.integer(key, default)
    if heads % groups:
        raise reader.refuse(key, f"must divide {heads_key} ({heads})")
    return groups
