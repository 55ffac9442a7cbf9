"""Weights of a plain checkpoint, quantized one by one while they are read."""

from collections.abc import Callable

from torch import Tensor

from troupellm.kernels.quantized import Fp8, Int4Group, Int8Channel, Int8WeightOnly, Weight
from troupellm.models.checkpoint import WeightSource
from troupellm.protocol.config import OnLoad

INT4_GROUPS = (128, 32)
"""The first that divides the inputs is taken."""
HEAD = "lm_head"


def int4(weight: Tensor) -> Weight:
    """A weight whose inputs no group divides stays as it is."""
    size = next((size for size in INT4_GROUPS if weight.shape[1] % size == 0), None)
    return weight if size is None else Int4Group.quantize(weight, size)


QUANTIZE: dict[OnLoad, Callable[[Tensor], Weight]] = {
    "int8": Int8Channel.quantize,
    "int8-weight-only": Int8WeightOnly.quantize,
    "int4": int4,
    "fp8": Fp8.quantize,
}
WITH_HEAD: frozenset[OnLoad] = frozenset({"int8", "int8-weight-only"})
"""Eight whole bits are enough for the vocabulary's scores; the others keep the head as it came."""


class QuantizeOnLoad:
    """A source whose linear weights come quantized; norms, embeddings and what is quantized already stay."""

    def __init__(self, source: WeightSource, mode: OnLoad) -> None:
        self._source, self._quantize, self._head = source, QUANTIZE[mode], mode in WITH_HEAD

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.take(name, shape)

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        weight = self._source.linear(name, shape)
        whole = name == "score" or (name == HEAD and not self._head)
        return self._quantize(weight) if isinstance(weight, Tensor) and not whole else weight

    def tied(self, embedding: Tensor) -> Weight:
        weight = self._source.tied(embedding)
        return self._quantize(weight) if isinstance(weight, Tensor) and self._head else weight

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        weights = self._source.stacked(name, shape, transposed=transposed)
        if weights is None:
            return None
        return [self._quantize(weight) if isinstance(weight, Tensor) else weight for weight in weights]

    def has(self, name: str) -> bool:
        return self._source.has(name)
