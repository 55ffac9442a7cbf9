"""Rows of token ids with a weight for every target, packed from the document stream.

Every row begins with the beginning of a document, because that is how every prompt begins. The
documents of a row see each other, so the model learns to answer after any preceding text.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from troupellm.training import corpus
from troupellm.training.documents import END_OF_TEXT, Piece


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs, the targets one step ahead, and how much each target counts."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise LookupError(f"the tokenizer has no {token}")
    return found


def encode(tokenizer: Tokenizer, pieces: list[Piece]) -> tuple[list[int], list[float]]:
    """A document as ids and weights, with the end-of-text mark."""
    ids: list[int] = []
    weights: list[float] = []
    for piece in pieces:
        part: list[int] = tokenizer.encode(piece.text).ids
        ids += part
        weights += [piece.weight] * len(part)
    last = 1.0 if pieces[-1].weight else 0.0
    return [*ids, token_id(tokenizer, END_OF_TEXT)], [*weights, last]


class Packer:
    """The source of batches of one seed; short rows and long rows come from separate streams."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._streams: dict[tuple[int, int], Iterator[list[Piece]]] = {}

    def batch(self, rows: int, length: int, stage: int = 0) -> Batch:
        """The next batch of a given form, from the mixture of a stage."""
        key = (length, stage)
        if key not in self._streams:
            seed = f"{self._seed} {length} {stage}"
            short = length <= 512
            self._streams[key] = corpus.documents(seed, stage) if short else corpus.long_documents(seed, length * 3)
        filled = [self._row(self._streams[key], length + 1) for _ in range(rows)]
        ids = torch.tensor([row[0] for row in filled])
        weights = torch.tensor([row[1] for row in filled])
        return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:])

    def _row(self, stream: Iterator[list[Piece]], length: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            more_ids, more_weights = encode(self._tokenizer, next(stream))
            ids += more_ids
            weights += more_weights
        return ids[:length], weights[:length]
