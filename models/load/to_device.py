"""Weights on the device, moved there one by one as layers take them."""

import copy

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import QuantizedWeight, Weight
from troupellm.models.checkpoint.safetensors import WeightSource


class OnDevice:
    """Another source's tensors, on a device."""

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        self._source, self._device = source, device

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As `WeightSource.take`."""
        return self._source.take(name, shape).to(self._device)

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `WeightSource.linear`."""
        return moved(self._source.linear(name, shape), self._device)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `WeightSource.embedding`."""
        return moved(self._source.embedding(name, shape), self._device)

    def tied(self, embedding: Weight) -> Weight:
        """As `WeightSource.tied`."""
        return moved(self._source.tied(embedding), self._device)

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        """As `WeightSource.stacked`."""
        found = self._source.stacked(name, shape, transposed=transposed)
        return None if found is None else [moved(weight, self._device) for weight in found]

    def has(self, name: str) -> bool:
        """As `WeightSource.has`."""
        return self._source.has(name)


def moved(weight: Weight, device: torch.device) -> Weight:
    """The weight on a device; one that holds more than plain tensors is dequantized on the way."""
    if not isinstance(weight, QuantizedWeight):
        return weight.to(device)
    there = copy.copy(weight)
    for name, value in vars(weight).items():
        if isinstance(value, Tensor):
            setattr(there, name, value.to(device))
    if all(tensor.device.type == device.type for tensor in there.tensors()):
        return there
    return weight.dequantize().to(device)
