"""Microscaling formats: small floating point with a power of two for every 32 inputs (OCP MX specification 1.0)."""

from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.base import QuantizedWeight, require, require_same
from troupellm.kernels.quantized_linear.outline import Code, Outline

BLOCK = 32
CPU = torch.device("cpu")
Element = Literal["fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2"]
CODES: dict[Element, Code] = {
    "fp4_e2m1": "mxfp4", "fp6_e2m3": "mxfp6", "fp6_e3m2": "mxfp6", "fp8_e4m3": "mxfp8", "fp8_e5m2": "mxfp8_e5m2",
}  # fmt: skip
_BITS = {"fp4_e2m1": (2, 1), "fp6_e2m3": (2, 3), "fp6_e3m2": (3, 2)}
_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Mx(QuantizedWeight):
    """w = element(code) * 2^(exponent - 127); inputs keep their type.

    Attributes:
        codes: uint8; one code per byte [out_features, in_features], but two for fp4_e2m1 [out_features,
            in_features / 2], even inputs in the low four bits.
        exponents: uint8 [out_features, ceil(in_features / 32)], e8m0; 255 is not a number.
        element: type of a code.
    """

    kind = "mx"

    def __init__(
        self, codes: Tensor, exponents: Tensor, element: Element, *, dtype: torch.dtype = torch.float32
    ) -> None:
        """
        Raises:
            ValueError: shapes or types do not fit each other.
        """
        require(codes.ndim == 2 and codes.dtype == torch.uint8, "codes must be uint8 [out, bytes]")
        require(element in _BITS or element in _TYPES, f"there is no element {element}")
        columns = codes.shape[1] * (2 if element == "fp4_e2m1" else 1)
        wanted = (codes.shape[0], -(-columns // BLOCK))
        require(exponents.dtype == torch.uint8, "exponents must be uint8")
        require(tuple(exponents.shape) == wanted, f"exponents must be {list(wanted)}")
        self.codes, self.exponents, self.element = codes.contiguous(), exponents.contiguous(), element
        self.shape, self.dtype = (codes.shape[0], columns), dtype

    @property
    def outlines(self) -> tuple[Outline, ...]:
        return (Outline(CODES[self.element], *self.shape, group=BLOCK),)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        codes = self.codes
        if self.element == "fp4_e2m1":
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).view(self.shape)
        values = element_values(self.element, codes.device)[codes.long()]
        scale = powers_of_two(self.exponents).repeat_interleave(BLOCK, dim=1)[:, : self.shape[1]]
        return (values * scale).to(dtype or self.dtype)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        require_same(parts, "element")
        codes, exponents = torch.cat([part.codes for part in parts]), torch.cat([part.exponents for part in parts])
        return cls(codes, exponents, parts[0].element, dtype=parts[0].dtype)

    def rows(self, index: Tensor | slice) -> Self:
        return type(self)(self.codes[index], self.exponents[index], self.element, dtype=self.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.exponents


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(exponent - 127), float32, of e8m0 exponents, uint8; they are the exponent bits of a float themselves."""
    bits = exponents.int() << 23
    bits = torch.where(exponents == 0, 1 << 22, bits)  # 2^-127, which has no normal float
    return torch.where(exponents == 255, 0x7FC00000, bits).int().view(torch.float32)


def element_values(element: Element, device: torch.device = CPU) -> Tensor:
    """The number of each code, float32 [number of codes]."""
    if element in _TYPES:
        return torch.arange(256, dtype=torch.uint8, device=device).view(_TYPES[element]).float()
    exponent_bits, mantissa_bits = _BITS[element]
    codes = torch.arange(1 << (1 + exponent_bits + mantissa_bits), device=device)
    mantissa = (codes & ((1 << mantissa_bits) - 1)).float() / (1 << mantissa_bits)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = (1 + mantissa) * powers_of_two(exponent - bias + 127)
    magnitude = torch.where(exponent > 0, normal, mantissa * 2.0 ** (1 - bias))
    return torch.where(codes >> (exponent_bits + mantissa_bits) > 0, -magnitude, magnitude)
