"""Checkpoints in AutoRound's own format: whole numbers, packed as GPTQ's tools or AutoAWQ pack them.

`packing_format` names the packing. `extra_config` has other settings for layers by name, or by a pattern; layers of 16
bits are stored plainly.
"""

import re
from typing import Any

from troupellm.kernels.quantized_linear import Outline, Weight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.awq import Awq
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.gptq import Gptq
from troupellm.models.quantization.options import (
    AUTOROUND_MAKING,
    MAKING,
    NUMBERS,
    PLAIN_BITS,
    check_numbers,
    ignored_note,
    only,
)

GPTQ, AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_READ = frozenset({"quant_method", "packing_format", "bits", "group_size", "sym", "extra_config", "lm_head", *NUMBERS})
_HARMLESS = frozenset({*MAKING, *AUTOROUND_MAKING})
_LAYER = frozenset({"bits", "group_size", "sym", *NUMBERS})
_PATTERN = re.compile(r"[*+?\[\](){}|\\^$]")


class AutoRound:
    """A `Format`."""

    method = "auto-round"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        self._notes = ignored_note(reader, only(reader, _READ, _HARMLESS))
        packing = reader.choice("packing_format", (GPTQ, AWQ))
        check_numbers(reader)
        values: dict[str, Any] = {
            "bits": reader.integer("bits"),
            "group_size": reader.integer("group_size", 128, least=-1),
        }
        layers = reader.section("extra_config")
        changes = {_rule(name, layers.section(name)): _change(layers.section(name)) for name in layers.values}
        if packing == GPTQ:
            values |= {"sym": reader.flag("sym", True), "dynamic": changes}
            self._packed: Gptq | Awq = Gptq(reader.like(values))
            return
        other = next((name for name in layers.values if _is_quantized(layers.section(name))), None)
        if other is not None:
            raise layers.refuse(other, f"must be of {PLAIN_BITS} bits with the packing {AWQ}")
        self._packed = Awq(reader.like(values | {"zero_point": True}))

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        return self._packed.linear(stored, name, shape)

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        return self._packed.outline(stored, name)

    def notes(self) -> tuple[str, ...]:
        return self._notes


def _is_quantized(layer: ConfigReader) -> bool:
    return layer.integer("bits", PLAIN_BITS) < PLAIN_BITS


def _rule(name: str, layer: ConfigReader) -> str:
    """A rule of GPTQModel's `dynamic`: which layers it is about, and whether they are quantized."""
    pattern = name if _PATTERN.search(name) else f"{re.escape(name)}$"
    return f"{'+' if _is_quantized(layer) else '-'}:{pattern}"


def _change(layer: ConfigReader) -> dict[str, Any]:
    """The settings of that rule.

    Raises:
        ModelLoadError: a setting is wrong or not supported.
    """
    only(layer, _LAYER, _HARMLESS)
    if not _is_quantized(layer):
        return {}
    check_numbers(layer)
    return {key: layer.values[key] for key in ("bits", "group_size", "sym") if layer.has(key)}
