"""Checkpoints in AutoRound's own format, whose numbers are packed as those of other tools.

`packing_format` names the packing, and for small floats `data_type` the numbers. `extra_config` has other settings for
layers by name, or by a pattern that is found anywhere in a name; layers of 16 bits are stored plainly.
"""

import re
from typing import Any, NamedTuple

from troupellm.kernels.quantized_linear import Outline, Weight
from troupellm.kernels.quantized_linear.mx import BLOCK, Element
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.awq import Awq
from troupellm.models.quantization.checkpoint import STATIC_INPUTS, QuantizationFormat, QuantizedCheckpoint
from troupellm.models.quantization.fp8 import Fp8Format
from troupellm.models.quantization.gptq import Settings, gptq_outline, gptq_weight
from troupellm.models.quantization.layer_patterns import safe_pattern
from troupellm.models.quantization.mx import mx_outline, mx_weight
from troupellm.models.quantization.nvfp4 import COMPRESSED, GROUP, nvfp4_outline, nvfp4_weight
from troupellm.models.quantization.options import (
    AUTOROUND_MAKING,
    MAKING,
    NUMBERS,
    PLAIN_BITS,
    check_numbers,
    ignored_note,
    only,
)
from troupellm.models.quantization.unpack import WIDTHS

GPTQ, GPTQ_V2 = ("auto_round:auto_gptq", "auto_round:gptq"), ("auto_round", "auto_round:gptqmodel")
"""Zero points are stored one too low, or as they are."""
AWQ, FP8 = ("auto_round:auto_awq", "auto_round:awq"), ("auto_round:fp8", "auto_round:fp8_static")
FLOATS = ("auto_round:llm_compressor",)
"""As compressed-tensors has them: MXFP4, MXFP8 and NVFP4."""
MX, NV, EIGHT = ("mx_fp", "mx_fp4", "mx_fp8", "mx_fp_rceil"), ("nv_fp", "nv_fp4"), ("fp", "fp8", "fp8_e4m3")
ELEMENTS: dict[int, Element] = {4: "fp4_e2m1", 8: "fp8_e4m3"}
_LAYER = frozenset({"bits", "group_size", "sym", *NUMBERS})
_READ = frozenset({"quant_method", "packing_format", "extra_config", "lm_head", "fmt", "activation_scheme", *_LAYER})
_HARMLESS = frozenset({*MAKING, *AUTOROUND_MAKING})
_PATTERN = re.compile(r"[*+?\[\](){}|\\^$]")


class Layer(NamedTuple):
    """How the numbers of a layer are stored."""

    bits: int
    group_size: int
    data_type: str

    @property
    def settings(self) -> Settings:
        """As GPTQ's packing needs them."""
        return Settings(self.bits, self.group_size, ordered=False)

    @property
    def mx(self) -> tuple[Element, str]:
        """Element type of microscaling floats, and the name of the tensor with their codes."""
        return ELEMENTS[self.bits], "weight_packed" if self.bits == 4 else "weight"


class AutoRound:
    """A `QuantizationFormat`."""

    method = "auto-round"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        self._notes = ignored_note(reader, only(reader, _READ, _HARMLESS))
        self._packing = reader.choice("packing_format", (*GPTQ, *GPTQ_V2, *AWQ, *FP8, *FLOATS))
        self._default = _layer(reader, self._packing)
        usual = {key: value for key, value in reader.values.items() if key in _LAYER}
        self._names: dict[str, Layer | None] = {}
        self._patterns: list[tuple[re.Pattern[str], Layer | None]] = []
        layers = reader.section("extra_config")
        for name in layers.values:
            section = layers.section(name)
            only(section, _LAYER, _HARMLESS)
            said = {key: value for key, value in section.values.items() if value is not None}
            layer = _layer(section.like(usual | said), self._packing)
            if self._packing in AWQ + FP8 and layer not in (None, self._default):
                raise layers.refuse(name, f"must be of {PLAIN_BITS} bits with the packing {self._packing}")
            if _PATTERN.search(name):
                self._patterns.append((safe_pattern(name, layers.place_of(name)), layer))
            else:
                self._names[name] = layer
        self._whole: QuantizationFormat | None = None
        """The format of all layers, in packings that have one alone."""
        if self._packing in AWQ:
            self._whole = Awq(reader.like(_only_numbers(usual) | {"zero_point": True}))
        elif self._packing in FP8:
            self._whole = _fp8(reader)
        self._drops_inputs = self._packing in FLOATS and reader.integer("act_bits", PLAIN_BITS) < PLAIN_BITS

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        layer = self._layer_of(stored, name)
        if layer is None:
            return stored.plain(name, shape)
        if self._whole is not None:
            return self._whole.linear(stored, name, shape)
        if self._packing not in FLOATS:
            return gptq_weight(stored, name, shape, layer.settings, minus_one=self._packing in GPTQ)
        stored.ignore(f"{name}.input_global_scale")
        if layer.data_type in NV:
            return nvfp4_weight(stored, name, shape, COMPRESSED)
        return mx_weight(stored, name, shape, *layer.mx)

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        layer = self._layer_of(stored, name)
        if layer is None:
            return None
        if self._whole is not None:
            return self._whole.outline(stored, name)
        if self._packing not in FLOATS:
            return gptq_outline(stored, name, layer.settings)
        if layer.data_type in NV:
            return nvfp4_outline(stored, name, COMPRESSED)
        return mx_outline(stored, name, *layer.mx)

    def notes(self) -> tuple[str, ...]:
        whole = () if self._whole is None else self._whole.notes()
        return (*self._notes, *whole, *((f"auto-round: {STATIC_INPUTS}",) if self._drops_inputs else ()))

    def _layer_of(self, stored: QuantizedCheckpoint, name: str) -> Layer | None:
        """By the layer's name, else by the first pattern. None where it is stored plainly."""
        if not any(stored.has(f"{name}.{key}") for key in ("qweight", "weight_scale", "weight_scale_inv")):
            return None
        if name in self._names:
            return self._names[name]
        return next((layer for pattern, layer in self._patterns if pattern.search(name)), self._default)


def _layer(reader: ConfigReader, packing: str) -> Layer | None:
    """
    Raises:
        ModelLoadError: a setting is wrong, or does not go with the packing.
    """
    bits = reader.integer("bits")
    if bits >= PLAIN_BITS:
        return None
    reader.flag("sym", True)
    widths: tuple[int, ...] = WIDTHS
    if packing in FP8:
        data_type, widths, size = reader.choice("data_type", EIGHT, EIGHT[1]), (8,), 0
    elif packing in FLOATS:
        data_type = reader.choice("data_type", (*MX, *NV))
        widths, wanted = ((4,), GROUP) if data_type in NV else (tuple(ELEMENTS), BLOCK)
        size = reader.integer("group_size", wanted)
        if size != wanted:
            raise reader.refuse("group_size", f"of {data_type} must be {wanted}")
    else:
        check_numbers(reader)
        data_type, size = "int", reader.integer("group_size", 128, least=-1)
        if size == 0:
            raise reader.refuse("group_size", "must be -1 or at least 1")
    if bits not in widths:
        raise reader.refuse("bits", f"must be one of {', '.join(map(str, widths))}, or {PLAIN_BITS}")
    return Layer(bits, size, data_type)


def _only_numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in ("bits", "group_size") if key in values}


def _fp8(reader: ConfigReader) -> Fp8Format:
    """A `group_size` of two numbers is a block."""
    size, eight = reader.values.get("group_size"), reader.integer("act_bits", PLAIN_BITS) < PLAIN_BITS
    values = {
        "weight_block_size": size if isinstance(size, list) else None,
        "activation_scheme": reader.values.get("activation_scheme") if eight else None,
        "fmt": reader.values.get("fmt"),
    }
    return Fp8Format(reader.like(values), eight_bit_inputs=eight)
