"""Matrix products with constant weights, in the layout that the device likes best."""

import torch
from torch import Tensor

from troupellm.kernels.linear.onednn import onednn_linear, onednn_pack, onednn_supports, padded_rows
from troupellm.kernels.linear.reference import linear_reference
from troupellm.kernels.quantized import FastProduct, QuantizedWeight, Weight, fast_product


class PackedLinear:
    """A weight made ready for many products. Holds no second copy of it."""

    __slots__ = ("bias", "fast", "in_features", "kind", "onednn", "out_features", "weight")

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.fast: FastProduct | None = None
        """Of a quantized weight that stays so; `weight` is empty then."""
        self.kind = ""
        """What a quantized weight is and what became of it, for the load log."""
        if isinstance(weight, QuantizedWeight):
            self.kind, self.fast = weight.kind, fast_product(weight, bias)
            if self.fast is None:
                self.kind += ", dequantized at load"
            weight = weight.dequantize() if self.fast is None else torch.empty(0)
        self.onednn = self.fast is None and onednn_supports(weight)
        self.weight = onednn_pack(weight) if self.onednn else weight
        self.bias = bias


def pack(weight: Weight, bias: Tensor | None = None) -> PackedLinear:
    """Make a weight ready for `linear`.

    Args:
        weight: [out_features, in_features], any float type or quantized. The result may share its memory. What has no
            fast path here is dequantized once.
        bias: [out_features] or None.
    """
    return PackedLinear(weight, bias)


def best_rows(packed: PackedLinear, rows: int) -> int:
    """Products are padded to so many rows; a caller with many products in a row pads once instead."""
    if packed.fast is not None:
        return packed.fast.best_rows(rows)
    return padded_rows(rows) if packed.onednn else rows


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x @ weight.T + bias.

    Args:
        x: [rows, in_features], the type of the weight, rows >= 1.

    Returns:
        [rows, out_features], contiguous.
    """
    if packed.fast is not None:
        return packed.fast(x)
    if packed.onednn:
        return onednn_linear(x, packed.weight, packed.bias)
    return linear_reference(x, packed.weight, packed.bias)
