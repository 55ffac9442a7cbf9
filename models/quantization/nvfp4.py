"""NVFP4 weights: e2m1 codes with an e4m3 scale for every 16 inputs, and one float32 factor for the whole weight."""

from typing import NamedTuple

import torch

from troupellm.kernels.quantized_linear import Outline, Table4, Weight
from troupellm.kernels.quantized_linear.mx import element_values
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.protocol.errors import ModelLoadError

GROUP = 16


class Spelling(NamedTuple):
    """How a tool stores such weights; the scales are `weight_scale` for all of them."""

    codes: str
    factor: str
    divides: bool
    """True if scales are divided by the factor, else multiplied."""


MODELOPT = Spelling("weight", "weight_scale_2", divides=False)
COMPRESSED = Spelling("weight_packed", "weight_global_scale", divides=True)


def nvfp4_weight(stored: QuantizedCheckpoint, name: str, shape: tuple[int, int], spelling: Spelling) -> Weight:
    """Read the weight of a layer: w = e2m1(code) * (scale * factor), or scale / factor.

    Raises:
        ModelLoadError: tensors are missing or do not fit the layer, or the factor is no number above zero.
    """
    rows, columns = shape
    if columns % GROUP:
        raise ModelLoadError(f"{name}: {columns} inputs are not a multiple of {GROUP}")
    codes = stored.raw(f"{name}.{spelling.codes}", (rows, columns // 2), "U8")
    scale = stored.raw(f"{name}.weight_scale", (rows, columns // GROUP), "F8_E4M3").float()
    key = f"{name}.{spelling.factor}"
    factor = stored.scalar_or(key, ((), (1,)), ("F32",)).reshape(())
    if not 0 < float(factor) < torch.inf:
        raise ModelLoadError(f"{key} must be a number above 0, got {float(factor)}")
    scale = scale / factor if spelling.divides else scale * factor
    return stored.build(name, lambda: Table4(codes, element_values("fp4_e2m1"), scale, dtype=stored.dtype))


def nvfp4_outline(stored: QuantizedCheckpoint, name: str, spelling: Spelling) -> Outline:
    """Outline of the weight that `nvfp4_weight` returns."""
    rows, octets = stored.sides(f"{name}.{spelling.codes}")
    return Outline("table4", rows, 2 * octets, GROUP)
