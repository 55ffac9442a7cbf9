"""A checkpoint whose linear weights are stored in one of the quantized formats."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import Outline, QuantizedWeight, Weight
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.protocol.errors import ModelLoadError

STATIC_INPUTS = "calibrated input scales are not used; inputs keep their type or get scales per token"
KV_CACHE = "calibrated scales of the KV cache are not used"
FLOATS = ("F32", "BF16", "F16")
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".output_scale")
"""Calibrated for an eight-bit KV cache; ours needs none."""


def layer_of(tensor: str) -> str:
    """The layer that a tensor belongs to; bitsandbytes has names below that of the weight."""
    above = tensor.rpartition(".")[0]
    return above.partition(".weight.")[0].removesuffix(".weight")


class QuantizationFormat(Protocol):
    """The parsed `quantization_config`, by which weights are read."""

    @property
    def method(self) -> str:
        """The name of the method."""

    def linear(self, stored: "QuantizedCheckpoint", name: str, shape: tuple[int, int]) -> Weight:
        """The weight of a layer, quantized as it is stored.

        Raises:
            ModelLoadError: tensors are missing, or do not fit the layer or each other.
        """

    def outline(self, stored: "QuantizedCheckpoint", name: str) -> Outline | None:
        """The outline of the weight that `linear` will return, from the headers; None if the layer is not quantized, or
        does not exist.

        Offsets of groups and an order of inputs may show only in the numbers: the outline then includes both.

        Raises:
            ModelLoadError: the layer is stored otherwise than the configuration says.
        """

    def notes(self) -> tuple[str, ...]:
        """Deviations from the checkpoint's settings, for the load log."""


class QuantizedCheckpoint(Checkpoint):
    """A `Checkpoint` that decodes a layer's quantized tensors."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, taken: Callable[[int], None], form: QuantizationFormat
    ) -> None:
        super().__init__(folder, dtype, taken)
        self.form, self.dtype = form, dtype
        self._quantized: set[str] = set()

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        weight = self.form.linear(self, name, shape)
        if isinstance(weight, QuantizedWeight):
            self._quantized.add(name)
        return weight

    def plain(self, name: str, shape: tuple[int, int]) -> Tensor:
        """A layer's weight that is not quantized."""
        return self.take(f"{name}.weight", shape)

    def build(self, name: str, make: Callable[[], QuantizedWeight]) -> QuantizedWeight:
        """Make a quantized weight; parts that do not fit together are the checkpoint's fault.

        Raises:
            ModelLoadError: names the layer.
        """
        try:
            return make()
        except ValueError as error:
            raise ModelLoadError(f"{name}: {error}") from error

    def sides(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix, from its header; (0, 0) for other shapes, which reading refuses."""
        shape = self.shape_of(name) or ()
        return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)

    def scalar_or(self, name: str, shapes: tuple[tuple[int, ...], ...], types: tuple[str, ...] = FLOATS) -> Tensor:
        """A tensor that may be stored in one of several shapes, in the type that it has."""
        shape = self.shape_of(name)
        return self.raw(name, shape if shape in shapes else shapes[0], *types)

    def finish(self) -> None:
        """As for any checkpoint; scales for the KV cache and biases of nothing but zeros may be left over."""
        for name in [name for name in self.names() if name.endswith(KV_SCALES)]:
            self.ignore(name)
        for layer in self._quantized:
            name = f"{layer}.bias"
            shape = self.shape_of(name)
            if shape is not None and self.raw(name, shape, *FLOATS).any():  # some writers give every layer a bias
                raise ModelLoadError(f"tensor {name} is not zero, though this model has no such bias")
        super().finish()
