"""Checkpoints with `quant_method` fp8: one scale for a weight, one per output, or one per block of 128 by 128.

w = value * weight_scale_inv of its block, or of the whole weight (DeepSeek's and transformers' name), or * weight_scale
"""

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import Fp8, Outline, Weight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, KV_CACHE, STATIC_INPUTS, QuantizedCheckpoint
from troupellm.models.quantization.options import ignored_note, only, pair, texts
from troupellm.protocol.errors import ModelLoadError

TYPES = ("F8_E4M3", "F8_E5M2")
EXPONENTS = ("F8_E8M0", "U8")
USUAL_BLOCK = (128, 128)
_INPUT_SCALES = ("input_scale", "activation_scale")
_READ = frozenset(
    {
        "quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
        "scale_fmt", "fmt", "kv_cache_scheme", "kv_cache_quant_method", "dequantize", "is_checkpoint_fp8_serialized",
        "expert_dtype",
    }
)  # fmt: skip


class Fp8Format:
    """A `QuantizationFormat`. The type of a layer's weight shows if the layer is quantized."""

    method = "fp8"

    def __init__(self, reader: ConfigReader, *, eight_bit_inputs: bool = True) -> None:
        """
        Args:
            eight_bit_inputs: as of `Fp8`.

        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        self._eight_bit_inputs = eight_bit_inputs
        self._notes = ignored_note(reader, only(reader, _READ))
        self._static = reader.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
        self._block = pair(reader, "weight_block_size") if reader.has("weight_block_size") else None
        self._kv_cache = reader.has("kv_cache_scheme") or reader.has("kv_cache_quant_method")
        self._unsaid = "weight_block_size" not in reader.values
        reader.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        reader.choice("scale_fmt", ("float", "ue8m0"), "float")
        reader.choice("expert_dtype", ("fp8",), "fp8")
        self._plain = {*texts(reader, "modules_to_not_convert"), *texts(reader, "ignored_layers")}

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        weight = f"{name}.weight"
        if stored.type_of(weight) not in TYPES:
            return stored.plain(name, shape)
        if name in self._plain:
            raise ModelLoadError(f"{weight} has an eight-bit type, though the list of layers to keep names it")
        values, inverse, block = (
            stored.raw(weight, shape, *TYPES),
            f"{name}.weight_scale_inv",
            self._blocks(stored, name),
        )
        if block is not None:
            wanted = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
            scale = numbers(stored.raw(inverse, wanted, *FLOATS, *EXPONENTS))
        elif stored.has(inverse):
            scale = stored.scalar_or(inverse, ((), (1,), (1, 1))).float().reshape(())
        else:
            scale = whole_scale(stored, name, shape[0])
        input_scales = [f"{name}.{key}" for key in _INPUT_SCALES]
        if self._static and not any(map(stored.has, input_scales)):
            raise ModelLoadError(f"{input_scales[0]} is missing, though activation_scheme is static")
        for input_scale in input_scales:
            stored.ignore(input_scale)
        eight = self._eight_bit_inputs
        return stored.build(name, lambda: Fp8(values, scale, block=block, eight_bit_inputs=eight, dtype=stored.dtype))

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        if stored.type_of(f"{name}.weight") not in TYPES:
            return None
        return fp8_outline(stored, name, self._blocks(stored, name), eight_bit_inputs=self._eight_bit_inputs)

    def notes(self) -> tuple[str, ...]:
        said = ((self._static, STATIC_INPUTS), (self._kv_cache, KV_CACHE))
        return (*self._notes, *(f"fp8: {note}" for holds, note in said if holds))

    def _blocks(self, stored: QuantizedCheckpoint, name: str) -> tuple[int, int] | None:
        """Rows and columns that have a scale together; None where the weight has one scale, or one per output.

        Where config.json does not say it, scales in two dimensions are those of the blocks that transformers assumes.
        """
        if self._block is None and self._unsaid and min(stored.sides(f"{name}.weight_scale_inv")) > 0:
            return USUAL_BLOCK
        return self._block


def fp8_outline(
    stored: QuantizedCheckpoint, name: str, block: tuple[int, int] | None, *, eight_bit_inputs: bool
) -> Outline:
    """Outline of an `Fp8` in `weight`."""
    rows, columns = stored.sides(f"{name}.weight")
    group = columns if block is None else min(block[1], columns)
    e4m3 = stored.type_of(f"{name}.weight") == TYPES[0]
    return Outline("fp8" if e4m3 else "fp8_e5m2", rows, columns, group, eight_bit_inputs=eight_bit_inputs)


def whole_scale(stored: QuantizedCheckpoint, name: str, rows: int) -> Tensor:
    """`weight_scale`: one number for all, or one per row."""
    return stored.scalar_or(f"{name}.weight_scale", ((rows, 1), (rows,), (1,), ())).float()


def numbers(scale: Tensor) -> Tensor:
    """Scales as float32; those of one byte are exponents of two (e8m0)."""
    if scale.dtype.itemsize > 1:
        return scale.float()
    exponents = scale.view(torch.uint8)
    scale = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents.int() - 127)
    return scale.masked_fill(exponents == 255, float("nan"))
