"""The weights of low-rank products, and which rows have which: the arguments of `low_rank_add`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels

Ints = NDArray[np.int64]
ToDevice = Callable[[NDArray[np.int32]], Tensor]


class LowRankWeights:
    """The low-rank weights of every group for one product, whose outputs may have several parts.

    Attributes:
        down: [groups, parts * rank, in_features]; a part's matrix begins at part * rank, zeros behind its own rank.
        ups: for each part its matrices [groups, rank, width], zeros behind the rank; views of [groups, width, rank]
            where kernels of a GPU compute.
        begins: for each part, its first output.
        ranks: int64 [groups], the largest rank of a part; 0 where the group adds nothing.
        bias: [groups, out_features]; None while no group has one.
        factors: [groups, out_features], by which rows are multiplied before the addition; None while no group has some.
    """

    def __init__(
        self,
        groups: int,
        rank: int,
        in_features: int,
        widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Zeros everywhere. On a CPU the system hands out memory as it is first written to.

        Args:
            rank: largest one that a group may have.
            widths: outputs of each part, side by side.
        """
        self.rank, self.by_kernels = rank, by_kernels(device)
        self.down = torch.zeros(groups, len(widths) * rank, in_features, dtype=dtype, device=device)
        self.ups = [self._up(groups, rank, width) for width in widths]
        self.begins = np.cumsum((0, *widths)).tolist()[:-1]
        self.widths, self.out_features = tuple(widths), sum(widths)
        self.ranks: Ints = np.zeros(groups, dtype=np.int64)
        self.bias: Tensor | None = None
        self.factors: Tensor | None = None

    def _up(self, groups: int, rank: int, width: int) -> Tensor:
        if self.by_kernels:
            return self.down.new_zeros(groups, width, rank).transpose(1, 2)
        return self.down.new_zeros(groups, rank, width)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.down, *self.ups))

    def clear(self, group: int) -> None:
        """Let a group add nothing."""
        if self.ranks[group]:
            for tensor in (self.down, *self.ups, *(() if self.bias is None else (self.bias,))):
                tensor[group].zero_()
            if self.factors is not None:
                self.factors[group].fill_(1.0)
            self.ranks[group] = 0

    def put(
        self, group: int, part: int, down: Tensor, up: Tensor, bias: Tensor | None, factor: Tensor | None = None
    ) -> None:
        """Write one part of a group that was cleared.

        Args:
            down: [rank, in_features].
            up: [width, rank].
            bias: [width], or None.
            factor: [width], or None.
        """
        rank = down.shape[0]
        begin, first = part * self.rank, self.begins[part]
        self.down[group, begin : begin + rank].copy_(down)
        self.ups[part][group, :rank].copy_(up.t())
        if bias is not None:
            if self.bias is None:
                self.bias = self.down.new_zeros(self.down.shape[0], self.out_features)
            self.bias[group, first : first + bias.shape[0]].copy_(bias)
        if factor is not None:
            if self.factors is None:
                self.factors = self.down.new_ones(self.down.shape[0], self.out_features)
            self.factors[group, first : first + factor.shape[0]].copy_(factor)
        self.ranks[group] = max(rank, int(self.ranks[group]))


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows that have a group, sorted by it, as the host knows them."""

    rows: Ints
    """int64 [n]."""
    groups: Ints
    """int64 [n], the group of each."""
    runs: tuple[tuple[int, Tensor | slice], ...]
    """Each group with its rows, int64 [..] or a slice where they lie side by side."""


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows that have a group, sorted by it."""

    device_rows: Tensor
    """int32 [n], on the device. Rows without a group may stand there, too, outside of all groups."""
    starts: Tensor
    """int32 [groups + 1], where each group's rows begin in `device_rows`, on the device."""
    host: HostRows | None
    """None where only the device knows them."""


def grouped_rows(of_rows: Ints, num_groups: int, to_device: ToDevice) -> GroupedRows:
    """
    Args:
        of_rows: int64 [rows], the group of each row; -1 is none.
        to_device: copies numbers there.
    """
    order = np.argsort(of_rows, kind="stable")
    starts = np.searchsorted(of_rows[order], np.arange(num_groups + 1))
    runs: list[tuple[int, Tensor | slice]] = []
    for group, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        if begin < end:
            first, last = int(order[begin]), int(order[end - 1])
            together = last - first == end - begin - 1  # `order` rises within a group
            runs.append((group, slice(first, last + 1) if together else torch.from_numpy(order[begin:end])))
    rows = order[starts[0] :]
    places, begins = to_device(rows.astype(np.int32)), to_device((starts - starts[0]).astype(np.int32))
    return GroupedRows(places, begins, HostRows(rows, of_rows[rows], tuple(runs)))


def rows_on_device(of_rows: Tensor, num_groups: int) -> GroupedRows:
    """`grouped_rows` of what lies on the device, without a wait for it, so that it can be part of a graph.

    Args:
        of_rows: int64 [rows], the group of each row; -1 is none.
    """
    if not by_kernels(of_rows.device):
        return grouped_rows(of_rows.numpy(), num_groups, torch.from_numpy)
    ordered, rows = torch.sort(of_rows, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_groups + 1, device=of_rows.device))
    return GroupedRows(rows.int(), starts.int(), None)
