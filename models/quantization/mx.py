"""Microscaling weights (OCP MX): codes of 4, 6 or 8 bits and a power of two for every 32 inputs."""

import torch

from troupellm.kernels.quantized_linear import Mx, Outline, Weight
from troupellm.kernels.quantized_linear.mx import BLOCK, CODES, Element
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.options import only, texts
from troupellm.models.quantization.unpack import unpack_octets
from troupellm.protocol.errors import ModelLoadError

_BITS: dict[Element, int] = {"fp4_e2m1": 4, "fp6_e2m3": 6, "fp6_e3m2": 6, "fp8_e4m3": 8, "fp8_e5m2": 8}
_TYPES = {4: ("U8",), 6: ("U8",), 8: ("U8", "F8_E4M3", "F8_E5M2")}


def mx_weight(
    stored: QuantizedCheckpoint, name: str, shape: tuple[int, int], element: Element, key: str = "weight"
) -> Weight:
    """Read `key` and `weight_scale` of a layer.

    Raises:
        ModelLoadError: they are missing, or do not fit the layer.
    """
    rows, columns = shape
    if columns % BLOCK:
        raise ModelLoadError(f"{name}: {columns} inputs are not a multiple of {BLOCK}")
    bits = _BITS[element]
    packed = stored.raw(f"{name}.{key}", (rows, columns * bits // 8), *_TYPES[bits]).view(torch.uint8)
    exponents = stored.raw(f"{name}.weight_scale", (rows, columns // BLOCK), "U8", "F8_E8M0").view(torch.uint8)
    codes = unpack_octets(packed, bits) if bits == 6 else packed
    return stored.build(name, lambda: Mx(codes, exponents, element, dtype=stored.dtype))


def mx_outline(stored: QuantizedCheckpoint, name: str, element: Element, key: str = "weight") -> Outline:
    """Outline of the weight that `mx_weight` returns."""
    rows, octets = stored.sides(f"{name}.{key}")
    return Outline(CODES[element], rows, octets * 8 // _BITS[element], BLOCK)


class Mxfp4:
    """A `QuantizationFormat`, gpt-oss's: experts alone are quantized (see mxfp4.py), all other layers are plain."""

    method = "mxfp4"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        only(reader, {"quant_method", "modules_to_not_convert", "dequantize"})
        texts(reader, "modules_to_not_convert")

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        return stored.plain(name, shape)

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        return None

    def notes(self) -> tuple[str, ...]:
        return ()
