"""Experts as gpt-oss has them: all of a layer in one tensor of four-bit blocks and one of scales."""

from typing import Protocol

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import Mx, Outline
from troupellm.protocol.errors import ModelLoadError

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32


class Raw(Protocol):
    """A checkpoint that gives tensors as they are stored."""

    def raw(self, name: str, shape: tuple[int, ...], kind: str) -> Tensor: ...


def mx_experts(source: Raw, name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Mx]:
    """One weight per expert, of tensors [experts, out, in / 32, 16] and [experts, out, in / 32], both uint8.

    Args:
        shape: experts, out_features, in_features.
        dtype: type in which products are computed.

    Raises:
        ModelLoadError: a tensor is missing or has another shape, or the inputs are no whole blocks.
    """
    experts, rows, columns = shape
    if columns % BLOCK:
        raise ModelLoadError(f"{name}{BLOCKS}: {columns} inputs are no multiple of {BLOCK}")
    codes = source.raw(f"{name}{BLOCKS}", (experts, rows, columns // BLOCK, BLOCK // 2), "U8")
    exponents = source.raw(f"{name}{SCALES}", (experts, rows, columns // BLOCK), "U8")
    return [Mx(*pair, "fp4_e2m1", dtype=dtype) for pair in zip(codes.flatten(2), exponents, strict=True)]


def experts_outline(shape: tuple[int, ...]) -> Outline:
    """Outline of all experts, one below the other, from the shape of their blocks; empty for any other shape."""
    experts, rows, blocks, _ = shape if len(shape) == 4 else (0, 0, 0, 0)
    return Outline("mxfp4", experts * rows, blocks * BLOCK, BLOCK)
