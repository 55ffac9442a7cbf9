"""Checkpoints with `quant_method` fp8: one scale for a weight, one per output, or one per block of 128 by 128.

w = value * weight_scale_inv of its block (DeepSeek's name), or * weight_scale
"""

import torch
from torch import Tensor

from troupellm.kernels.quantized import Fp8, Outline, Weight
from troupellm.models.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import FLOATS, KV_CACHE, STATIC_INPUTS, QuantizedCheckpoint
from troupellm.models.quantization.options import only, pair, texts
from troupellm.protocol.errors import ModelLoadError

TYPES = ("F8_E4M3", "F8_E5M2")
EXPONENTS = ("F8_E8M0", "U8")
_READ = frozenset(
    {
        "quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
        "scale_fmt", "fmt", "kv_cache_scheme", "kv_cache_quant_method", "dequantize", "is_checkpoint_fp8_serialized",
        "expert_dtype",
    }
)  # fmt: skip


class Fp8Format:
    """A `Format`. Whether a layer is quantized is seen from the type of its weight."""

    method = "fp8"

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a setting is wrong or not supported.
        """
        only(reader, _READ)
        self._static = reader.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
        self._block = pair(reader, "weight_block_size") if reader.has("weight_block_size") else None
        self._kv_cache = reader.has("kv_cache_scheme") or reader.has("kv_cache_quant_method")
        reader.choice("fmt", ("e4m3",), "e4m3")
        reader.choice("scale_fmt", ("float", "ue8m0"), "float")
        reader.choice("expert_dtype", ("fp8",), "fp8")
        self._plain = {*texts(reader, "modules_to_not_convert"), *texts(reader, "ignored_layers")}

    def linear(self, stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
        weight = f"{name}.weight"
        if stored.type_of(weight) not in TYPES:
            return stored.plain(name, shape)
        if name in self._plain:
            raise ModelLoadError(f"{weight} has an eight-bit type, though the list of layers to keep names it")
        values, inverse = stored.raw(weight, shape, *TYPES), f"{name}.weight_scale_inv"
        if self._block is None:
            if stored.has(inverse):
                raise ModelLoadError(f"{inverse} is there, though weight_block_size is not set")
            scale = whole_scale(stored, name, shape[0])
        else:
            wanted = (-(-shape[0] // self._block[0]), -(-shape[1] // self._block[1]))
            scale = numbers(stored.raw(inverse, wanted, *FLOATS, *EXPONENTS))
        input_scale = f"{name}.input_scale"
        if self._static and not stored.has(input_scale):
            raise ModelLoadError(f"{input_scale} is missing, though activation_scheme is static")
        stored.ignore(input_scale)
        return stored.build(
            name, lambda: Fp8(values, scale, block=self._block, eight_bit_inputs=True, dtype=stored.dtype)
        )

    def outline(self, stored: QuantizedCheckpoint, name: str) -> Outline | None:
        if stored.type_of(f"{name}.weight") not in TYPES:
            return None
        return fp8_outline(stored, name, self._block, eight_bit_inputs=True)

    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"fp8: {note}" for holds, note in ((self._static, STATIC_INPUTS), (self._kv_cache, KV_CACHE)) if holds
        )


def fp8_outline(
    stored: QuantizedCheckpoint, name: str, block: tuple[int, int] | None, *, eight_bit_inputs: bool
) -> Outline:
    """Of an `Fp8` in `weight`."""
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
