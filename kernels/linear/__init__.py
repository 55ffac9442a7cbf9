"""Matrix products with constant weights, in the fastest layout for the device.

On a CPU in float32: few rows by compiled code (64; up to 4,096 with AVX-512), more by oneDNN, both on one packed
weight. With AMX, compiled code computes all rows, since tiles multiply float32 numbers in bfloat16 parts faster than
oneDNN multiplies whole ones. Without a compiler, oneDNN computes all rows. Other devices and types use torch. Quantized
weights have paths of their own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from troupellm.kernels.common.batch_invariance import batch_invariance
from troupellm.kernels.common.onednn import onednn_linear, onednn_pack, onednn_supports, padded_rows
from troupellm.kernels.gated_act import gelu_mul, gelu_mul_quantized, silu_mul, silu_mul_quantized
from troupellm.kernels.linear.batch_invariant import in_fixed_tiles, whole_tiles
from troupellm.kernels.linear.cpu import cpp_weight
from troupellm.kernels.linear.reference import linear_reference
from troupellm.kernels.meeting import SumOfRanks
from troupellm.kernels.quantized_linear import FastProduct, FewRows, QuantizedWeight, Weight, fast_product
from troupellm.kernels.quantized_linear.gpu import EightBitProduct, GpuProduct
from troupellm.kernels.rms_norm import rms_norm

GATES = {"silu": silu_mul, "gelu_tanh": gelu_mul}
GATE_QUANTIZED = {"silu": silu_mul_quantized, "gelu_tanh": gelu_mul_quantized}
HALVES = (torch.bfloat16, torch.float16)
LEAVES_SUMS = "dtype_out" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]
"""True if torch can return products of these types as float32."""


class PackedLinear:
    """A weight prepared for many products. Holds no second copy of it."""

    __slots__ = (
        "bias", "fast", "in_features", "invariant", "kind", "native", "onednn", "out_features", "ranks", "tiled",
        "weight",
    )  # fmt: skip

    def __init__(self, weight: Weight, bias: Tensor | None, ranks: SumOfRanks | None = None) -> None:
        self.ranks = ranks
        """Of which each has a part of the inputs; None: this process has all of them."""
        self.out_features, self.in_features = weight.shape
        self.fast: FastProduct | None = None
        """The product of a weight that stays quantized; `weight` is empty then."""
        self.kind = ""
        """The kind of a quantized weight and how it is stored here, for the load log."""
        if isinstance(weight, QuantizedWeight):
            self.kind, self.fast = weight.kind, fast_product(weight, bias)
            if self.fast is None:
                self.kind += ", dequantized at load"
            nothing = torch.empty(0, dtype=torch.float32, device=weight.tensors()[0].device)
            weight = weight.dequantize() if self.fast is None else nothing
        self.onednn = self.fast is None and onednn_supports(weight.device, weight.dtype)
        self.weight = onednn_pack(weight) if self.onednn else weight
        self.bias = bias
        self.invariant = batch_invariance()
        self.tiled = self.invariant and not isinstance(self.fast, GpuProduct)
        """True if products are computed in tiles of fixed size for invariance; a `GpuProduct` has its own tiles."""
        self.native: FewRows | None = None
        """The compiled path for few rows."""
        if self.onednn:
            self.native = cpp_weight(self.weight, weight, bias, splits=not self.invariant)
        if self.fast is not None:
            self.native = self.fast.native

    def takes(self, rows: int) -> bool:
        """True if the compiled path computes this many rows."""
        return self.native is not None and (rows <= self.native.most_rows or self.invariant)

    @property
    def fuses(self) -> bool:
        """True if, for few rows, the compiled path fuses the RMSNorm before and the residual add behind at no cost."""
        return self.native is not None


def pack(weight: Weight, bias: Tensor | None = None, ranks: SumOfRanks | None = None) -> PackedLinear:
    """Make a weight ready for `linear`.

    Args:
        weight: [out_features, in_features], any float type or quantized. The result may share its memory. A weight
            without a fast path here is dequantized once.
        bias: [out_features] or None.
        ranks: each has such a weight, of inputs of its own, and the product is the sum over them.
    """
    return PackedLinear(weight, bias, ranks)


def packs_copies(device: torch.device, dtype: torch.dtype) -> bool:
    """True if `pack` copies a plain weight instead of sharing its memory."""
    return onednn_supports(device, dtype)


def best_rows(packed: PackedLinear, rows: int) -> int:
    """The number of rows to which products are padded; a caller with several products in sequence pads once instead."""
    if packed.fast is not None:
        return packed.fast.best_rows(rows)
    if packed.tiled and packed.weight.device.type == "cuda":
        return whole_tiles(rows, packed.weight.device)
    return padded_rows(rows) if packed.onednn and not packed.takes(rows) and not packed.invariant else rows


class QuantizedRows(NamedTuple):
    """Inputs [rows, in_features] in eight bits, for a product that would convert them to eight bits itself. On a GPU it
    saves a launch if the previous operation converts them."""

    values: Tensor
    scale: Tensor
    """float32 [rows], see `kernels.act_quant`."""
    dtype: torch.dtype
    """The dtype of the original inputs."""


def activation_dtype(packed: PackedLinear) -> torch.dtype | None:
    """The dtype of the `QuantizedRows` that `linear` accepts; None if it accepts none."""
    return packed.fast.values.dtype if isinstance(packed.fast, EightBitProduct) else None


def linear(x: Tensor | QuantizedRows, packed: PackedLinear) -> Tensor:
    """x @ weight.T + bias.

    Args:
        x: [rows, in_features], the type of the weight, rows >= 1; the numbers of a row lie side by side. Or codes of
            the type that `activation_dtype` says.

    Returns:
        [rows, out_features], contiguous.
    """
    if isinstance(x, QuantizedRows):
        assert isinstance(packed.fast, EightBitProduct)
        found = packed.fast.of_quantized(*x)
    elif packed.native is not None and packed.takes(x.shape[0]):
        found = packed.native.linear(x, None, 0.0, None, 1.0)
    elif packed.tiled:
        found = in_fixed_tiles(x, lambda tile: _product(tile, packed))
    else:
        found = _product(x, packed)
    if packed.ranks is not None:
        packed.ranks.sum_(found)
    return found


def norm_linear(x: Tensor, norm: Tensor, eps: float, packed: PackedLinear) -> Tensor:
    """`linear` of `rms_norm(x, norm, eps)`; x is left as it is."""
    if packed.native is not None and packed.takes(x.shape[0]):
        return packed.native.linear(x, norm, eps, None, 1.0)
    return linear(rms_norm(x, norm, eps), packed)


def norm_scores(x: Tensor, norm: Tensor, eps: float, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """`norm_linear` as float32. On a GPU the float32 sums are returned without rounding them before, where possible:
    this saves an extra pass over the [rows, vocab] logits.

    Args:
        out: float32 [rows, out_features], the tensor to write to.
    """
    plain = packed.fast is None and packed.bias is None and not packed.tiled
    if plain and packed.weight.device.type != "cpu" and packed.weight.dtype in HALVES and LEAVES_SUMS:
        return torch.mm(rms_norm(x, norm, eps), packed.weight.t(), out_dtype=torch.float32, out=out)
    found = norm_linear(x, norm, eps, packed)
    return found.float() if out is None else out.copy_(found)


def gated_linear(
    x: Tensor | QuantizedRows, packed: PackedLinear, activation: str, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """activation(first half) * second half of `linear`, behind a norm where one is given.

    Args:
        x: as of `linear`; codes without a norm.
        activation: "silu" or "gelu_tanh".

    Returns:
        [rows, out_features / 2], contiguous.
    """
    if isinstance(x, QuantizedRows):
        return GATES[activation](linear(x, packed))
    if packed.native is not None and packed.native.gates and packed.takes(x.shape[0]):
        return packed.native.gated(x, norm, eps, activation)
    gate_up = linear(x, packed) if norm is None else norm_linear(x, norm, eps, packed)
    return GATES[activation](gate_up)


def gated_quantized(
    x: Tensor | QuantizedRows, packed: PackedLinear, activation: str, codes: torch.dtype
) -> QuantizedRows:
    """`gated_linear`, for a product that takes codes of that type."""
    gate_up = linear(x, packed)
    return QuantizedRows(*GATE_QUANTIZED[activation](gate_up, codes), gate_up.dtype)


def linear_add(x: Tensor, packed: PackedLinear, residual: Tensor, factor: float = 1.0) -> None:
    """Add `factor` times `linear(x)` to `residual` [rows, out_features], in place."""
    if packed.native is not None and packed.ranks is None and packed.takes(x.shape[0]):
        packed.native.linear(x, None, 0.0, residual, factor)
    else:
        residual.add_(linear(x, packed), alpha=factor)


def _product(x: Tensor, packed: PackedLinear) -> Tensor:
    if packed.fast is not None:
        return packed.fast(x)
    if packed.onednn:
        return onednn_linear(x, packed.weight, packed.bias)
    return linear_reference(x, packed.weight, packed.bias)
