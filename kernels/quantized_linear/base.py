"""The interface of all quantized weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.quantized_linear.outline import Outline


class QuantizedWeight(ABC):
    """A weight [out_features, in_features] in fewer bits, with the arithmetic that gives it its meaning.

    Attributes:
        shape: of the weight that it stands for.
        dtype: type in which products are computed, and the default type of `dequantize`.
    """

    kind: ClassVar[str]
    """Name in the load log."""
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    @abstractmethod
    def outlines(self) -> tuple[Outline, ...]:
        """Its outline; if it has several parts, one below the other, one for each."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight as plain numbers, [out_features, in_features]; computed in float32, rounded once."""

    @classmethod
    @abstractmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Parts with the same input as one weight, one below the other.

        Raises:
            Unmergeable: they differ in what all rows of one weight must share.
        """

    @abstractmethod
    def rows(self, index: Tensor | slice) -> Self:
        """Some of the rows, in the order of `index`, int64 [rows]."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias as it is defined; slow.

        Args:
            x: [rows, in_features], any float type.
            bias: [out_features] or None.
        """
        return functional.linear(x, self.dequantize(x.dtype), bias)


class Unmergeable(ValueError):
    """These weights cannot be merged into one."""


def require(condition: bool, text: str) -> None:
    """For the checks of constructors.

    Raises:
        ValueError: the condition does not hold.
    """
    if not condition:
        raise ValueError(text)


def require_same(parts: Sequence[QuantizedWeight], *names: str) -> None:
    """Check that parts agree.

    Raises:
        Unmergeable: they do not.
    """
    for name in ("dtype", *names):
        if len({getattr(part, name) for part in parts}) > 1:
            raise Unmergeable(f"weights of different {name}")
    if len({part.shape[1] for part in parts}) > 1:
        raise Unmergeable("weights of different inputs")
