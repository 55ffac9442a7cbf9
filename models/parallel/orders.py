"""Orders of the leader to the other ranks, which decide nothing themselves: so that all compute the same.

The leader has the plans, the rows, the sampler and the guides. The others have weights, a KV cache, and no state of
requests, so that nothing can differ: a step's block tables and tokens travel with it (a few kilobytes).
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
_HEAD = 8
"""Numbers at the beginning of each order, int32: its kind, and what the kind says."""


class Kind(IntEnum):
    SIZES = 1
    FORWARD = 2
    LOGITS = 3
    COPY = 4
    INPUTS = 5
    END = 6
    """The leader needs the others no longer."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The leader's decisions about memory, which hold for all ranks."""

    num_blocks: int
    max_model_len: int

    def encode(self) -> bytes:
        return _order(Kind.SIZES, self.num_blocks, self.max_model_len)

    @classmethod
    def decode(cls, order: "Order") -> Self:
        return cls(*order.said[:2])


@dataclass(frozen=True, slots=True)
class Forward:
    """A flat batch of tokens for the layers."""

    starts: Ints
    """[rows] first position of each row."""
    counts: Ints
    """[rows] positions."""
    token_ids: Ints
    """[tokens]."""
    wanted: Ints | None
    """[some] tokens whose hidden states are wanted; None is all."""
    tables: NDArray[np.int32]
    """[groups, rows, width] block ids."""

    def encode(self) -> bytes:
        groups, rows, width = self.tables.shape
        wanted = -1 if self.wanted is None else self.wanted.size
        arrays = (self.starts, self.counts, self.token_ids, *(() if self.wanted is None else (self.wanted,)))
        return _order(Kind.FORWARD, rows, self.token_ids.size, wanted, groups, width, arrays=(*arrays, self.tables))

    @classmethod
    def decode(cls, order: "Order") -> Self:
        rows, tokens, wanted, groups, width = order.said[:5]
        starts, counts, token_ids, kept, tables = order.cut(rows, rows, tokens, max(wanted, 0), groups * rows * width)
        return cls(
            starts=starts.astype(np.int64),
            counts=counts.astype(np.int64),
            token_ids=token_ids.astype(np.int64),
            wanted=None if wanted < 0 else kept.astype(np.int64),
            tables=tables.reshape(groups, rows, width),
        )


@dataclass(frozen=True, slots=True)
class Inputs:
    """Embeddings that stand for tokens of the next batch."""

    places: Tensor
    """int64 [some] of the batch's tokens."""
    values: Tensor
    """float32 [some, hidden]."""

    def encode(self) -> bytes:
        values = self.values.float().contiguous().numpy()
        return _order(Kind.INPUTS, *values.shape, arrays=(self.places.numpy(), values.view(np.int32)))

    @classmethod
    def decode(cls, order: "Order") -> Self:
        count, width = order.said[:2]
        places, values = order.cut(count, count * width)
        found = values.view(np.float32).reshape(count, width)
        return cls(torch.from_numpy(places.astype(np.int64)), torch.from_numpy(found.copy()))


@dataclass(frozen=True, slots=True)
class Logits:
    """Hidden states [rows, hidden] for the head."""

    hidden: Tensor

    def encode(self) -> bytes:
        rows, width = self.hidden.shape
        return _order(Kind.LOGITS, rows, width) + self.hidden.contiguous().view(torch.uint8).numpy().tobytes()

    @classmethod
    def decode(cls, order: "Order", dtype: torch.dtype) -> Self:
        """dtype: of the model."""
        return cls(torch.frombuffer(bytearray(order.rest), dtype=dtype).view(order.said[0], order.said[1]))


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks of the KV cache, (source, target) each."""

    pairs: list[tuple[int, int]]

    def encode(self) -> bytes:
        return _order(Kind.COPY, len(self.pairs), arrays=(np.array(self.pairs, dtype=np.int64),))

    @classmethod
    def decode(cls, order: "Order") -> Self:
        (pairs,) = order.cut(2 * order.said[0])
        return cls([(int(source), int(target)) for source, target in pairs.reshape(-1, 2)])


END = np.array([Kind.END, *[0] * (_HEAD - 1)], dtype=np.int32).tobytes()
"""The last order."""


class Order:
    """A message, read up to its kind."""

    def __init__(self, data: bytes) -> None:
        head = np.frombuffer(data, dtype=np.int32, count=_HEAD).tolist()
        self.kind, self.said = Kind(head[0]), head[1:]
        self.rest = data[4 * _HEAD :]

    def cut(self, *sizes: int) -> list[NDArray[np.int32]]:
        """The numbers behind the head, in pieces.

        Raises:
            ValueError: there are more, or fewer.
        """
        numbers = np.frombuffer(self.rest, dtype=np.int32)
        if numbers.size != sum(sizes):
            raise ValueError(f"an order of {numbers.size} numbers, not {sum(sizes)}")
        return np.split(numbers, np.cumsum(sizes[:-1]))


def _order(kind: Kind, *said: int, arrays: tuple[NDArray[np.integer[Any]], ...] = ()) -> bytes:
    head = np.zeros(_HEAD, dtype=np.int32)
    head[: 1 + len(said)] = (kind, *said)
    return b"".join((head.tobytes(), *(np.ascontiguousarray(array, dtype=np.int32).tobytes() for array in arrays)))
