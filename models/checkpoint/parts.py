"""A part of a stored tensor, which one rank of several reads."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Part(NamedTuple):
    """Ranges of one dimension of a tensor, to lie behind each other."""

    dim: int
    """0 or 1."""
    ranges: tuple[tuple[int, int], ...]
    """First index and the one behind the last, each."""


class PartSource(Protocol):
    """A source of weights that reads parts of tensors."""

    def take_part(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """As `WeightSource.take`, of a part of a tensor. A tensor is taken once.

        Args:
            shape: of the whole tensor.
        """
