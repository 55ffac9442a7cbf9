"""The rows of a step that compute with adapters, and the products that are added for them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.grouped_linear import grouped_linear
from troupellm.kernels.linear.batch_invariant import in_fixed_tiles
from troupellm.models.adapters.sites import HEAD_LAYER
from troupellm.models.adapters.slots import AdapterSlots, SiteSlots

Ints = NDArray[np.int64]
ToDevice = Callable[[NDArray[np.int32]], Tensor]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of some hidden states that have adapters."""

    groups: tuple[tuple[int, Tensor | slice], ...]
    """For each slot in use, from 0 on: the rows, int64 [n] or a slice where they lie side by side."""
    rows: Tensor
    """int32 [n], the same rows behind each other, on the device."""
    starts: Tensor
    """int32 [slots + 1], where each slot's rows begin in `rows`, on the device."""


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """The adapters of a flat batch of tokens."""

    slots: AdapterSlots
    tokens: AdapterRows
    kept: AdapterRows
    """Of the tokens that logits are wanted for."""
    invariant: bool
    """Each row is computed alike, to the bit, with any other rows."""

    def add(self, layer: int, name: str, x: Tensor, out: Tensor, *, kept: bool = False) -> None:
        """Add the adapters' part of one product to its result, in place.

        Args:
            layer: number of the layer.
            name: of the site, see `Site`.
            x: input of the product, [rows, in_features].
            out: its result, [rows, out_features], the numbers of a row side by side.
            kept: the rows are those that logits are wanted for, not all tokens.
        """
        _add(self.slots.site(layer, name), x, out, self.kept if kept else self.tokens, invariant=self.invariant)


@dataclass(frozen=True, slots=True)
class HeadAdapters:
    """The adapters of some rows of logits."""

    slots: AdapterSlots
    rows: AdapterRows
    invariant: bool

    def __call__(self, normed: Tensor, scores: Tensor) -> None:
        """Add the adapters' part to scores, in place.

        Args:
            normed: hidden states behind the final norm, [rows, hidden].
            scores: float32 [rows, vocab].
        """
        site = self.slots.site(HEAD_LAYER, "head")
        if not any(site.ranks[slot] for slot, _ in self.rows.groups):
            return
        if not by_kernels(normed.device) or normed.dtype == scores.dtype:
            _add(site, normed, scores, self.rows, invariant=self.invariant)
            return
        found = torch.zeros(scores.shape, dtype=normed.dtype, device=scores.device)
        _add(site, normed, found, self.rows, invariant=self.invariant)
        scores.add_(found)


def adapter_rows(of_rows: Ints, num_slots: int, to_device: ToDevice) -> AdapterRows:
    """Sort rows by their adapters.

    Args:
        of_rows: int64 [rows], the slot of each, from 1 on; 0 is none.
        to_device: copies numbers there.
    """
    order = np.argsort(of_rows, kind="stable")
    starts = np.searchsorted(of_rows[order], np.arange(1, num_slots + 2))
    groups: list[tuple[int, Tensor | slice]] = []
    for slot, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        if begin < end:
            first, last = int(order[begin]), int(order[end - 1])
            together = last - first == end - begin - 1  # `order` rises within a slot
            groups.append((slot, slice(first, last + 1) if together else torch.from_numpy(order[begin:end])))
    chosen, begins = order[starts[0] :].astype(np.int32), (starts - starts[0]).astype(np.int32)
    return AdapterRows(tuple(groups), to_device(chosen), to_device(begins))


def adapter_batch(
    slots: AdapterSlots, of_tokens: Ints, kept: Ints, to_device: ToDevice, *, invariant: bool
) -> AdapterBatch:
    """
    Args:
        of_tokens: int64 [tokens], the slot of each, from 1 on; 0 is none.
        kept: int64 [logits], the tokens that logits are wanted for.
    """
    tokens = adapter_rows(of_tokens, slots.num_slots, to_device)
    return AdapterBatch(slots, tokens, adapter_rows(of_tokens[kept], slots.num_slots, to_device), invariant)


def _add(site: SiteSlots, x: Tensor, out: Tensor, rows: AdapterRows, *, invariant: bool) -> None:
    if by_kernels(x.device):
        _add_by_kernels(site, x, out, rows)
        return
    for slot, places in rows.groups:
        if site.ranks[slot]:
            _add_group(site, slot, x, out, places, invariant=invariant)


def _add_group(site: SiteSlots, slot: int, x: Tensor, out: Tensor, places: Tensor | slice, *, invariant: bool) -> None:
    """Add one slot's product to its rows, on a CPU."""
    rank = site.ranks[slot]
    down = site.down[slot].view(len(site.parts), site.max_rank, -1)[:, :rank].flatten(0, 1)
    ups = [up[slot, :, :rank].t() for up in site.ups]

    def product(rows: Tensor) -> Tensor:
        inner = rows @ down.t()
        return torch.cat([inner[:, part * rank : (part + 1) * rank] @ up for part, up in enumerate(ups)], dim=1)

    found = in_fixed_tiles(x[places], product) if invariant else product(x[places])
    if site.bias is not None:
        found += site.bias[slot]
    if isinstance(places, slice):
        out[places] += found
    else:
        out.index_add_(0, places, found.to(out.dtype))


def _add_by_kernels(site: SiteSlots, x: Tensor, out: Tensor, rows: AdapterRows) -> None:
    """Add all slots' products, one launch for the way to the rank and one per part for the way back."""
    inner = torch.zeros(x.shape[0], site.down.shape[1], dtype=x.dtype, device=x.device)
    grouped_linear(x, site.down, rows.rows, rows.starts, inner)
    for number, (part, up) in enumerate(zip(site.parts, site.ups, strict=True)):
        begin = number * site.max_rank
        target = out[:, part.begin : part.begin + part.width]
        grouped_linear(inner[:, begin : begin + site.max_rank], up, rows.rows, rows.starts, target)
    if site.bias is not None:
        counts = (rows.starts[1:] - rows.starts[:-1]).long()
        of_rows = torch.repeat_interleave(counts, output_size=rows.rows.shape[0])
        out.index_add_(0, rows.rows.long(), site.bias[of_rows])
