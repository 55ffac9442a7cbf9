"""The parts of an adapter that are as wide as the vocabulary: the embedding's, and weights that replace the base's."""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.linear.batch_invariant import in_fixed_tiles

Places = Tensor | slice
"""Rows of a batch, int64 [..] or a slice."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """None where the base model's own numbers count."""

    down: Tensor | None = None
    """[vocab, rank]; down[id] @ up is added to a token's vector."""
    up: Tensor | None = None
    """[rank, hidden], times the adapter's scale."""
    embedding: Tensor | None = None
    """[vocab, hidden], in place of the base model's."""
    head: Tensor | None = None
    """[vocab, hidden], in place of the base model's."""

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for field in fields(self) if (tensor := getattr(self, field.name)) is not None]

    def to(self, device: torch.device) -> Self:
        """On a device; the same memory where it is there."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{name: None if tensor is None else tensor.to(device) for name, tensor in found.items()})

    def embed(self, token_ids: Tensor, places: Places, out: Tensor, scale: float) -> None:
        """Change the vectors of some tokens, in place.

        Args:
            token_ids: int64 [tokens].
            places: the tokens that have this adapter.
            out: [tokens, hidden], the base model's vectors times `scale`.
        """
        ids = token_ids[places]
        if self.embedding is not None:
            out[places] = functional.embedding(ids, self.embedding).to(out.dtype) * scale
        if self.down is not None and self.up is not None:
            out[places] += (functional.embedding(ids, self.down) @ self.up).to(out.dtype) * scale

    def score(self, normed: Tensor, places: Places, scores: Tensor, *, invariant: bool) -> None:
        """Replace the scores of some rows by those of the adapter's own head, if it has one.

        Args:
            normed: hidden states behind the final norm, [rows, hidden].
            places: the rows that have this adapter.
            scores: float32 [rows, vocab].
            invariant: each row is computed alike, to the bit, beside any others.
        """
        head = self.head
        if head is None:
            return
        if invariant:
            scores[places] = in_fixed_tiles(normed[places], lambda rows: functional.linear(rows, head)).float()
        else:
            scores[places] = functional.linear(normed[places], head).float()
