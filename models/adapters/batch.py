"""The rows of a step that compute with adapters, and what is added for them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.fused_moe.experts import AddToExpert
from troupellm.kernels.low_rank import low_rank_add
from troupellm.kernels.low_rank.native import LayerAdapters, load
from troupellm.kernels.low_rank.weights import GroupedRows, ToDevice, grouped_rows, rows_on_device
from troupellm.models.adapters.experts import additions
from troupellm.models.adapters.sites import HEAD_LAYER
from troupellm.models.adapters.slots import AdapterSlots

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """The adapters of a flat batch of tokens."""

    slots: AdapterSlots
    tokens: GroupedRows
    kept: GroupedRows
    """Of the tokens that logits are wanted for."""
    invariant: bool
    """Each row is computed alike, to the bit, beside any others."""

    def add(self, layer: int, name: str, x: Tensor, out: Tensor, *, kept: bool = False) -> None:
        """Add the adapters' part of one product to its result, in place.

        Args:
            layer: number of the layer.
            name: of the site, see `Site`.
            x: input of the product, [rows, in_features].
            out: its result, [rows, out_features], the numbers of a row side by side.
            kept: the rows are those that logits are wanted for, not all tokens.
        """
        rows = self.kept if kept else self.tokens
        low_rank_add(x, self.slots.site(layer, name), rows, out, batch_invariant=self.invariant)

    def embed(self, token_ids: Tensor, out: Tensor, scale: float) -> None:
        """Change the vectors of tokens whose adapters change the embedding, in place.

        Args:
            token_ids: int64 [tokens].
            out: [tokens, hidden], the base model's vectors times `scale`.
        """
        for group, places in () if self.tokens.host is None else self.tokens.host.runs:
            if (vocabulary := self.slots.vocabulary(group + 1)) is not None:
                vocabulary.embed(token_ids, places, out, scale)

    def experts(self, layer: int, tokens: int, *, kept: bool) -> AddToExpert | None:
        """The addition to the experts of a layer; None where no row's adapter changes them.

        Args:
            tokens: number of rows.
            kept: the rows are those that logits are wanted for, not all tokens.
        """
        rows = (self.kept if kept else self.tokens).host
        if rows is None:
            return None
        found = [(group, self.slots.experts(group + 1, layer)) for group, _ in rows.runs]
        groups = [(group, adapter) for group, adapter in found if adapter is not None]
        if not groups:
            return None
        of_tokens = torch.full((tokens,), -1)
        of_tokens[torch.from_numpy(rows.rows)] = torch.from_numpy(rows.groups)
        return additions(groups, of_tokens)

    @property
    def compiled(self) -> bool:
        """True if compiled code adds the adapters of a float32 model on a CPU. It multiplies no results, and invariant
        rows take one path in steps of any size, which is layer by layer."""
        if self.invariant or load() is None:
            return False
        return self.tokens.host is not None and not self.slots.scales(self.tokens.host.groups + 1)

    def of_layers(self) -> LayerAdapters:
        """The adapters of all layers for compiled code, which computes them in one call."""
        assert self.tokens.host is not None
        assert self.kept.host is not None
        return LayerAdapters(self.slots.of_layers, self.tokens.host, self.kept.host)


def adapter_batch(
    slots: AdapterSlots, of_tokens: Ints, kept: Ints, to_device: ToDevice, *, invariant: bool
) -> AdapterBatch:
    """
    Args:
        of_tokens: int64 [tokens], the slot of each, from 1 on; 0 is none.
        kept: int64 [logits], the tokens that logits are wanted for.
        to_device: copies numbers there.
    """
    tokens, of_kept = (grouped_rows(of - 1, slots.num_slots, to_device) for of in (of_tokens, of_tokens[kept]))
    return AdapterBatch(slots, tokens, of_kept, invariant)


def graph_batch(slots: AdapterSlots, of_tokens: Tensor) -> AdapterBatch:
    """As `adapter_batch`, of tokens that all have logits and whose slots lie on the device, int64 [tokens]. Biases and
    heads of adapters are left out: see `AdapterSlots.goes_into_graphs`."""
    rows = rows_on_device(of_tokens - 1, slots.num_slots)
    return AdapterBatch(slots, rows, rows, invariant=False)


@dataclass(frozen=True, slots=True)
class HeadAdapters:
    """The adapters of some rows of logits."""

    slots: AdapterSlots
    rows: GroupedRows
    invariant: bool

    @classmethod
    def of(cls, slots: AdapterSlots, of_rows: Ints, to_device: ToDevice, *, invariant: bool) -> "HeadAdapters":
        """of_rows: as `of_tokens` of `adapter_batch`."""
        return cls(slots, grouped_rows(of_rows - 1, slots.num_slots, to_device), invariant)

    def __call__(self, normed: Tensor, scores: Tensor) -> None:
        """Add the adapters' part to scores, in place.

        Args:
            normed: hidden states behind the final norm, [rows, hidden].
            scores: float32 [rows, vocab].
        """
        if self.rows.host is None:
            return
        for group, places in self.rows.host.runs:
            if (vocabulary := self.slots.vocabulary(group + 1)) is not None:
                vocabulary.score(normed, places, scores, invariant=self.invariant)
        weights = self.slots.site(HEAD_LAYER, "head")
        if not any(weights.ranks[group] for group, _ in self.rows.host.runs):
            return
        found = scores
        if weights.by_kernels and normed.dtype != scores.dtype:
            found = torch.zeros(scores.shape, dtype=normed.dtype, device=scores.device)
        low_rank_add(normed, weights, self.rows, found, batch_invariant=self.invariant)
        if found is not scores:
            scores.add_(found)
