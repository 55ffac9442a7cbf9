"""Weights of a plain checkpoint, quantized one by one while they are read."""

from collections.abc import Callable

from torch import Tensor

from troupellm.kernels.quantized_linear import (
    Fp8,
    Int4Group,
    Int8Channel,
    Int8WeightOnly,
    Outline,
    QuantizedWeight,
    Weight,
)
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.protocol.config.setting_types import OnLoad

INT4_GROUPS = (128, 32)
"""The first that divides the inputs is taken."""
HEAD = "lm_head"


def int4_group(columns: int) -> int | None:
    """The group size; None if no group divides the inputs."""
    return next((size for size in INT4_GROUPS if columns % size == 0), None)


def int4(weight: Tensor) -> Weight:
    """A weight whose inputs no group divides stays as it is."""
    size = int4_group(weight.shape[1])
    return weight if size is None else Int4Group.quantize(weight, size)


QUANTIZE: dict[OnLoad, Callable[[Tensor], Weight]] = {
    "int8": Int8Channel.quantize,
    "int8-weight-only": Int8WeightOnly.quantize,
    "int4": int4,
    "fp8": Fp8.quantize,
}


def outline_on_load(mode: OnLoad, rows: int, columns: int) -> Outline | None:
    """Outline of a weight of this shape after `QUANTIZE`; None if it is not quantized."""
    match mode:
        case "int8":
            return Outline("int8", rows, columns, columns, eight_bit_inputs=True)
        case "int8-weight-only":
            return Outline("int8", rows, columns, columns)
        case "fp8":
            return Outline("fp8", rows, columns, columns, eight_bit_inputs=True)
        case "int4":
            size = int4_group(columns)
            return None if size is None else Outline("int4", rows, columns, size, offsets=True)


WITH_HEAD: frozenset[OnLoad] = frozenset({"int8", "int8-weight-only"})
"""Eight whole bits are enough for the vocabulary's scores; the others keep the head as it came."""

TURNED = (".kv_b_proj",)
"""Ends of names of weights that layers take apart and hold whole: fewer bits would cost accuracy and save nothing."""
ANY_STORED: frozenset[OnLoad] = frozenset({"int8"})
"""Modes that also apply to quantized checkpoints: weights in other bits are quantized once more."""


def quantized(weight: Weight, mode: OnLoad) -> Weight:
    """A weight in that mode; one that is stored quantized stays so, unless the mode is also for those."""
    if isinstance(weight, QuantizedWeight):
        if mode not in ANY_STORED or isinstance(weight, Int8Channel):
            return weight
        weight = weight.dequantize()
    return QUANTIZE[mode](weight)


class QuantizeOnLoad:
    """A source whose linear weights come quantized; norms and embeddings stay."""

    def __init__(self, source: WeightSource, mode: OnLoad) -> None:
        self._source, self._mode, self._head = source, mode, mode in WITH_HEAD

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.take(name, shape)

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        weight = self._source.linear(name, shape)
        whole = name == "score" or name.endswith(TURNED) or (name == HEAD and not self._head)
        return weight if whole else quantized(weight, self._mode)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        return self._source.embedding(name, shape)

    def tied(self, embedding: Weight) -> Weight:
        weight = self._source.tied(embedding)
        return quantized(weight, self._mode) if self._head else weight

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        weights = self._source.stacked(name, shape, transposed=transposed)
        if weights is None:
            return None
        return [quantized(weight, self._mode) for weight in weights]

    def has(self, name: str) -> bool:
        return self._source.has(name)
