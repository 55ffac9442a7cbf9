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
from troupellm.kernels.quantized_linear.gguf import blocks_outline
from troupellm.kernels.quantized_linear.gguf_search import block_layout, quantize_blocks
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.protocol.config.setting_types import OnLoad
from troupellm.protocol.errors import ModelLoadError

INT4_GROUPS = (128, 32)
"""The first that divides the inputs is taken."""
FINE_BITS = 6
COARSE_BITS = 4
COARSE = ("gate_proj", "up_proj", "gate_up_proj", ".w1", ".w3")
"""Ends of names of weights that have `COARSE_BITS` under int4 on a CPU; the others, whose errors cost more, have
`FINE_BITS`. They are about half of a model."""
HEAD = "lm_head"


def int4_group(columns: int) -> int | None:
    """The group size; None if no group divides the inputs."""
    return next((size for size in INT4_GROUPS if columns % size == 0), None)


def int4(weight: Tensor) -> Weight:
    """A weight whose inputs no group divides stays as it is."""
    size = int4_group(weight.shape[1])
    return weight if size is None else Int4Group.quantize(weight, size)


def int4_blocks(weight: Tensor, *, coarse: bool) -> Weight:
    """A weight in the blocks of GGUF files, in which a CPU computes; it stays as it is if no block fits."""
    layout = block_layout(COARSE_BITS if coarse else FINE_BITS, weight.shape[1])
    return weight if layout is None else quantize_blocks(weight, layout)


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


def int4_blocks_outline(rows: int, columns: int, *, coarse: bool) -> Outline | None:
    """Outline of a weight of this shape after `int4_blocks`; None if it is not quantized."""
    layout = block_layout(COARSE_BITS if coarse else FINE_BITS, columns)
    return None if layout is None else blocks_outline(layout, rows, columns)


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
        return weight if whole else self._quantized(name, weight)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        return self._source.embedding(name, shape)

    def tied(self, embedding: Weight) -> Weight:
        weight = self._source.tied(embedding)
        return quantized(weight, self._mode) if self._head else weight

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        weights = self._source.stacked(name, shape, transposed=transposed)
        if weights is None:
            return None
        return [self._quantized(name, weight) for weight in weights]

    def _quantized(self, name: str, weight: Weight) -> Weight:
        if self._mode == "int4" and isinstance(weight, Tensor) and weight.device.type == "cpu":
            try:
                return int4_blocks(weight, coarse=name.endswith(COARSE))
            except ValueError as error:
                raise ModelLoadError(f"tensor {name}: {error}", hint="use --quantization int8 or none") from error
        return quantized(weight, self._mode)

    def has(self, name: str) -> bool:
        return self._source.has(name)
