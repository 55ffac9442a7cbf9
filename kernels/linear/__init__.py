"""Matrix products with constant weights, in the layout that the device likes best."""

from torch import Tensor

from troupellm.kernels.linear.onednn import onednn_linear, onednn_pack, onednn_supports, padded_rows
from troupellm.kernels.linear.reference import linear_reference


class PackedLinear:
    """A weight made ready for many products. Holds no second copy of it."""

    __slots__ = ("bias", "in_features", "onednn", "out_features", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.onednn = onednn_supports(weight)
        self.weight = onednn_pack(weight) if self.onednn else weight
        self.bias = bias


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Make a weight ready for `linear`.

    Args:
        weight: [out_features, in_features], any float type. The result may share its memory.
        bias: [out_features] or None.
    """
    return PackedLinear(weight, bias)


def best_rows(packed: PackedLinear, rows: int) -> int:
    """Products are padded to so many rows; a caller with many products in a row pads once instead."""
    return padded_rows(rows) if packed.onednn else rows


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x @ weight.T + bias.

    Args:
        x: [rows, in_features], the type of the weight, rows >= 1.

    Returns:
        [rows, out_features], contiguous.
    """
    if packed.onednn:
        return onednn_linear(x, packed.weight, packed.bias)
    return linear_reference(x, packed.weight, packed.bias)
