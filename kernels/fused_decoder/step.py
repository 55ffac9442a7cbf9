"""A whole decoding step in one compiled call, float32, int8 or GGUF weights on a CPU: the counterpart of a CUDA graph.

In a small model's step, the Python code between compiled parts takes a quarter of the time: the weights of every step
evict the interpreter's, torch's and numpy's code from the processor's caches. Here the caller passes the rows' slots in
the worker's own tables, and one call computes everything from a row's last token to its next one. The operations are
those of `kernels.decoder_layers`, `kernels.linear` and `kernels.sampling`, to the bit.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels import cpp
from troupellm.kernels.cpp import guard
from troupellm.kernels.cpp.checks import RefusedCall, check, check_array, require
from troupellm.kernels.fused_decoder.layers import DecoderLayers, load as load_layers
from troupellm.kernels.linear import PackedLinear
from troupellm.kernels.quantized_linear.cpu_blocks import BlockProduct
from troupellm.kernels.sampling.cpu import Columns, compiled as load_sampling

MOST_LOGITS = 1 << 23
"""Numbers of all rows' logits, whose memory is kept from step to step."""

Pair = tuple[Tensor, Tensor]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowMemory:
    """The worker's tables of rows, by slot. Arrays are contiguous, and written to by every step."""

    tokens: NDArray[np.int32]
    """[slots, longest]."""
    lengths: Ints
    """[slots], how many tokens are known."""
    blocks: NDArray[np.int32]
    """[groups, slots, width]."""
    num_blocks: Ints
    """[groups, slots]."""

    def __post_init__(self) -> None:
        """
        Raises:
            RefusedCall: an array of another type or shape.
        """
        groups, slots, width = self.blocks.shape
        check_array("tokens", self.tokens, np.int32, slots, self.tokens.shape[-1])
        check_array("lengths", self.lengths, np.int64, slots)
        check_array("blocks", self.blocks, np.int32, groups, slots, width)
        check_array("numbers of blocks", self.num_blocks, np.int64, groups, slots)


@dataclass(frozen=True, slots=True)
class Ends:
    """The parts of a model before and after its layers."""

    embedding: Tensor | BlockProduct
    """float32 [vocab, hidden], contiguous; or a weight in blocks."""
    factor: float
    """Factor on the embeddings."""
    norm: Tensor
    """float32 [hidden]."""
    eps: float
    head: PackedLinear


class DecodeStep:
    """A model and its cache in the form of compiled code: `struct Model` of decode_step.cpp."""

    def __init__(
        self,
        function: cpp.Function,
        layers: DecoderLayers,
        rotations: Sequence[Pair],
        caches: Sequence[Pair],
        ends: Ends,
        views: Sequence[tuple[int, int]],
        codes: Tensor,
        most_rows: int,
    ) -> None:
        """
        Args:
            rotations, caches: as of `DecoderLayers.run`.
            views: group and window of each view of the cache; window 0 is none.
            codes: `noise.token_codes`.

        Raises:
            RefusedCall: a tensor of another type or shape than the layers need.
        """
        assert ends.head.native is not None
        assert ends.head.native.part is not None
        self._function, self._vocab, self.most_rows = function, ends.head.out_features, most_rows
        embedding = _embedding_numbers(ends.embedding, layers.hidden)
        check("norm", ends.norm, torch.float32, layers.hidden)
        check("codes", codes, torch.int32, self._vocab)
        require(ends.head.in_features == layers.hidden, f"a head of {ends.head.in_features} inputs")
        require(len(views) >= layers.num_views, f"{len(views)} views of the cache, the layers name {layers.num_views}")
        groups, windows = np.array(views, dtype=np.int64).T.copy()
        require(min(groups.min(), windows.min()) >= 0, "a view's group and window are 0 or more")
        self._num_groups = 1 + int(groups.max())
        factors = np.array([ends.factor, ends.eps]).view(np.int64).tolist()
        cpp_layers = layers.cpp_layers(rotations, caches)
        self._model = np.array(
            [*cpp_layers.numbers, *embedding, factors[0], ends.norm.data_ptr(), factors[1], *ends.head.native.part,
             len(views), groups.ctypes.data, windows.ctypes.data],
            dtype=np.int64,
        )  # fmt: skip
        self._held = (layers, cpp_layers, rotations, caches, ends, groups, windows, codes)
        self._codes = codes.data_ptr()
        self._memory: RowMemory | None = None
        self._columns: Columns | None = None
        self._slots: tuple[Ints, Ints] | None = None
        self._memory_numbers = self._column_numbers = np.empty(0, dtype=np.int64)
        self._addresses: tuple[int, ...] = ()
        self._resize(1)

    def run(
        self, memory: RowMemory, columns: Columns, slots: Ints, option_slots: Ints, starts: Sequence[int]
    ) -> list[int] | None:
        """Compute a position of each row and choose its next token, which is written to its row.

        Args:
            memory: of the rows at `slots` [rows], no slot twice, at most `most_rows`.
            columns: how rows choose, by `option_slots` [rows].
            starts: the positions.

        Returns:
            the tokens, as of `sampling.native.Functions.choose`, whose logits are in `logits` and `peaks`. None where a
            position is not that of its row's last token, which the model knows, or has no block: nothing was changed.

        Raises:
            RefusedCall: arrays of another type or shape, or slots that are not in them.
        """
        count = len(starts)
        if count > self._starts.size:
            self._resize(count)
        if memory is not self._memory or columns is not self._columns:
            self._set_numbers(memory, columns)
        if self._slots is None or self._slots[0] is not slots or self._slots[1] is not option_slots:
            check_array("slots", slots, np.int64, slots.size)
            check_array("slots of options", option_slots, np.int64, slots.size)
            require(np.unique(slots).size == slots.size, "a slot stands there twice")
            self._slots = slots, option_slots
            self._addresses = slots.ctypes.data, option_slots.ctypes.data
        if slots.size != count:
            raise RefusedCall(f"{slots.size} slots of {count} rows")
        self._starts[:count] = starts
        self._function(*self._pointers, *self._addresses, *self._room, count, *self._found, torch.get_num_threads())
        return self._tokens[:count].tolist() if self._done[0] else None

    def _resize(self, rows: int) -> None:
        """Allocate memory for `rows` rows of the last step: `logits` [rows, vocab] and the largest of each, `peaks`
        [rows]."""
        self.logits = guard.empty("logits", rows, self._vocab)
        self._starts = np.zeros(rows, dtype=np.int64)
        self._tokens, self._done = (
            guard.empty(name, size, dtype=torch.int64).numpy() for name, size in (("tokens", rows), ("done", 1))
        )
        self.peaks = guard.empty("peaks", rows).numpy()
        self._room = (self._starts.ctypes.data,)
        self._found = (
            self.logits.data_ptr(), self._tokens.ctypes.data, self.peaks.ctypes.data, self._done.ctypes.data,
        )  # fmt: skip

    def _set_numbers(self, memory: RowMemory, columns: Columns) -> None:
        groups, slots, width = memory.blocks.shape
        require(groups >= self._num_groups, f"blocks of {groups} groups, the model has {self._num_groups}")
        self._memory, self._columns = memory, columns
        self._memory_numbers = np.array(
            [memory.tokens.ctypes.data, memory.tokens.shape[1], memory.lengths.ctypes.data, memory.blocks.ctypes.data,
             memory.num_blocks.ctypes.data, groups, slots, width],
            dtype=np.int64,
        )  # fmt: skip
        self._column_numbers = np.array(
            [
                *(of.ctypes.data for of in (columns.streams, columns.scales, columns.floors)),
                self._codes,
                columns.streams.size,
            ],
            dtype=np.int64,
        )
        self._pointers = (self._model.ctypes.data, self._memory_numbers.ctypes.data, self._column_numbers.ctypes.data)


def decode_step(
    layers: DecoderLayers,
    rotations: Sequence[Pair],
    caches: Sequence[Pair],
    ends: Ends,
    views: Sequence[tuple[int, int]],
    codes: Tensor,
) -> DecodeStep | None:
    """A model's steps as one call; None where its head has no part in it, or without compiled code."""
    function, few = load(), ends.head.native
    if function is None or few is None or few.part is None:
        return None
    most = min(layers.most_rows, few.most_rows, MOST_LOGITS // ends.head.out_features)
    table = ends.embedding
    if most < 1 or (isinstance(table, Tensor) and not (table.dtype == torch.float32 and table.is_contiguous())):
        return None
    return DecodeStep(function, layers, rotations, caches, ends, views, codes, most)


def _embedding_numbers(embedding: Tensor | BlockProduct, hidden: int) -> tuple[int, int, int]:
    """Addresses of its floats and of its blocks, of which one is 0, and the number of tokens.

    Raises:
        RefusedCall: it is of another type or width.
    """
    if isinstance(embedding, Tensor):
        check("embedding", embedding, torch.float32, embedding.shape[0], hidden)
        return embedding.data_ptr(), 0, embedding.shape[0]
    require(embedding.in_features == hidden, f"embeddings of {embedding.in_features} numbers, not {hidden}")
    return 0, embedding.part[1], embedding.out_features


@functools.cache
def load() -> cpp.Function | None:
    """The compiled function. Its operations were compared with their references one by one."""
    library = cpp.load()
    if library is None or load_layers() is None or load_sampling() is None:
        return None
    return library.function("decode_step", "ppp" + "ppp" + "i" + "pppp" + "i")
