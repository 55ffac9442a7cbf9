"""Each rank's part of a checkpoint's weights; only that part is read.

| weight | rule |
|---|---|
| queries, keys, values, gate, up, each for itself where they are merged | rows; their biases and sinks too |
| projection behind attention, down | columns; the bias is the leader's |
| fewer KV heads than ranks | a KV head is on several ranks |
| experts | as a feed-forward part, each of them |
| head | rows of the vocabulary |
| all else: norms, embedding | whole |
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from troupellm.kernels.meeting import SumOfRanks
from troupellm.kernels.quantized_linear import Weight
from troupellm.models.checkpoint.parts import Part, PartSource
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.checkpoint.weight_names import HEAD
from troupellm.models.config.decoder_config import DecoderConfig, LayerShape, MoeConfig
from troupellm.models.layers.attention import SINKS
from troupellm.models.parallel.ranks import Ranks

_LAYER = "model.layers."
_SUMMED = ("self_attn.o_proj", "mlp.down_proj")
"""Layers whose results are parts of a sum. The results of all experts of a layer are added up together."""
EXPERTS = "experts"
_DOWN_BIAS = "down_proj_bias"
Range = tuple[int, int]


class DividedSource(WeightSource, PartSource, Protocol):
    """A source of whole weights and of parts of them."""


class Division(NamedTuple):
    """The part of a layer's weight [outputs, inputs] that a rank has."""

    whole: int
    """Outputs, or inputs, of the whole weight."""
    part: Part


class ShardedWeights:
    """Implements `WeightSource` and `layers.projections.Divided`, for the layers of `local_config`."""

    def __init__(self, source: DividedSource, model: DecoderConfig, ranks: Ranks) -> None:
        """model: whole."""
        self._source, self._model, self._ranks = source, model, ranks
        self._rank, self._size = ranks.number, ranks.size

    def sum_of(self, name: str) -> SumOfRanks | None:
        """As `Divided.sum_of`."""
        _, part, last = _split(name)
        return self._ranks if f"{part}.{last}" in _SUMMED or last == EXPERTS else None

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As `WeightSource.take`, of this rank's part, which has that shape."""
        layer, _, kind = name.rpartition(".")
        if kind == _DOWN_BIAS:
            return self._once(name, shape)
        division = self._division(layer if kind in ("weight", "bias") else name)
        if division is None:
            return self._source.take(name, shape)
        whole, part = division
        if kind != "bias":
            shape = (*shape[: part.dim], whole, *shape[part.dim + 1 :])
            return self._source.take_part(name, shape, part)
        if part.dim == 0:
            return self._source.take_part(name, (whole,), part)
        return self._once(name, shape)

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `take`, of a layer's weight."""
        return self.take(f"{name}.weight", shape)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `WeightSource.embedding`: whole."""
        return self._source.embedding(name, shape)

    def tied(self, embedding: Weight) -> Weight:
        """This rank's rows of the embedding."""
        assert isinstance(embedding, Tensor)
        ((begin, end),) = self._rows(embedding.shape[0]).part.ranges
        return embedding[begin:end]

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        """As `WeightSource.stacked`, of this rank's part of each expert."""
        number, _, last = _split(name)
        moe = self._model.layers[number].experts
        assert moe is not None
        count, rows, columns = shape
        size, (begin, end) = self._even(moe.intermediate_size)
        if last == "down_proj":
            downs = self._source.stacked(name, (count, rows, size), transposed=transposed)
            return None if downs is None else [_plain(down)[:, begin:end].contiguous() for down in downs]
        found = self._source.stacked(name, (count, 2 * size, columns), transposed=transposed)
        ranges = self._gate_up(moe).part.ranges
        return None if found is None else [torch.cat([_plain(one)[i:j] for i, j in ranges]) for one in found]

    def has(self, name: str) -> bool:
        """As `WeightSource.has`."""
        return self._source.has(name)

    def _division(self, name: str) -> Division | None:
        """Of a layer, or of a tensor beside layers; None: every rank has all of it."""
        if name == HEAD:
            return self._rows(self._model.vocab_size)
        if not name.startswith(_LAYER):
            return None
        number, part, last = _split(name)
        shape = self._model.layers[number]
        if part == "self_attn":
            return self._attention(last, shape)
        if shape.experts is None:
            return self._feed_forward(last, shape.intermediate_size) if part == "mlp" else None
        return self._experts(part, last, shape.experts)

    def _feed_forward(self, name: str, size: int) -> Division | None:
        """size: its inner width."""
        if name == "down_proj":
            return self._columns(size)
        if name not in self._model.gate_up(size):
            return None
        return self._sections([self._even(size)] * (1 + (name == self._model.gate_up_name)))

    def _experts(self, part: str, name: str, moe: MoeConfig) -> Division | None:
        """part: within the layer."""
        block, _, inner = part.partition(".")
        if block not in moe.names.blocks:
            return None
        if inner == moe.names.shared:
            return self._feed_forward(name, moe.shared_size)
        kind, _, _ = inner.partition(".")
        if kind != EXPERTS:
            return None
        if name == moe.names.down:
            return self._columns(moe.intermediate_size)
        if name in (moe.names.gate, moe.names.up):
            return self._rows(moe.intermediate_size)
        if name == "gate_up_proj_bias":
            whole, part_of_rows = self._gate_up(moe)
            return Division(whole, Part(1, part_of_rows.ranges))
        if name in ("gate_proj_bias", "up_proj_bias"):
            return self._columns(moe.intermediate_size)
        return None

    def _gate_up(self, moe: MoeConfig) -> Division:
        """Of an expert's gate and up in one tensor."""
        if moe.names.interleaved:
            return self._sections([self._scaled(self._even(moe.intermediate_size), 2)])
        return self._sections([self._even(moe.intermediate_size)] * 2)

    def _once(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A bias that is added to a sum: the leader's, and zeros elsewhere."""
        bias = self._source.take(name, shape)
        return bias if self._rank == 0 else torch.zeros_like(bias)

    def _attention(self, name: str, shape: LayerShape) -> Division | None:
        model, value = self._model, shape.value_dim or shape.head_dim
        queries = self._scaled(self._even(shape.num_heads), shape.head_dim)
        keys, values = (self._scaled(self._kv_heads(shape), size) for size in (shape.head_dim, value))
        if name == "o_proj":
            return self._columns(shape.mixed_width)
        if name in SINKS:
            return self._rows(shape.num_heads)
        if name == "q_proj":
            return self._sections([queries])
        if name == "k_proj":
            return self._sections([keys])
        if name == "v_proj":
            return self._sections([values])
        if name != model.qkv_name:
            return None
        if (
            model.qkv_by_group and shape.num_kv_heads > 1
        ):  # heads of the keys lie one behind the other, each with all that belongs to it
            return self._rows(shape.query_width + shape.key_width + shape.value_width)
        return self._sections([queries, keys, values])

    def _even(self, whole: int) -> tuple[int, Range]:
        """The whole, and this rank's range of it."""
        return whole, (whole * self._rank // self._size, whole * (self._rank + 1) // self._size)

    def _kv_heads(self, shape: LayerShape) -> tuple[int, Range]:
        heads = shape.num_kv_heads
        if heads >= self._size:
            return self._even(heads)
        shared = self._rank * heads // self._size
        return heads, (shared, shared + 1)

    @staticmethod
    def _scaled(heads: tuple[int, Range], size: int) -> tuple[int, Range]:
        """From heads to their numbers."""
        whole, (begin, end) = heads
        return whole * size, (begin * size, end * size)

    def _rows(self, whole: int) -> Division:
        return self._sections([self._even(whole)])

    def _columns(self, whole: int) -> Division:
        return Division(whole, Part(1, (self._even(whole)[1],)))

    @staticmethod
    def _sections(sections: list[tuple[int, Range]]) -> Division:
        """Rows of several weights that lie behind each other in one tensor."""
        starts = [0]
        for whole, _ in sections:
            starts.append(starts[-1] + whole)
        ranges = tuple(
            (start + begin, start + end)
            for (start, _), (_, (begin, end)) in zip(pairwise(starts), sections, strict=True)
        )
        return Division(starts[-1], Part(0, ranges))


def _split(name: str) -> tuple[int, str, str]:
    """The number of a layer, the part of it, and the name within the part; -1 and "" of a tensor beside layers."""
    if not name.startswith(_LAYER):
        return -1, "", name
    number, _, rest = name.removeprefix(_LAYER).partition(".")
    part, _, last = rest.rpartition(".")
    return int(number), part, last


def _plain(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight
