"""The base model's weights, as adapters need them that are made for its numbers and not for its products alone."""

from typing import Protocol

from torch import Tensor


class BaseWeights(Protocol):
    """Reads single weights anew, on any thread."""

    def stored(self, module: str, shape: tuple[int, int]) -> Tensor | None:
        """A weight [out_features, in_features] as the checkpoint stores it; None where it is not stored plainly.

        Args:
            module: its name within the decoder, without "model.".
        """

    def computed(self, module: str, shape: tuple[int, int], *, bias: bool) -> tuple[Tensor, Tensor | None] | None:
        """The numbers that a weight stands for, and its bias; None where there is no checkpoint.

        Args:
            bias: there is one.
        """
