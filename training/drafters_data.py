"""Rows of the model's own texts with its features, and the three losses over what it wrote.

Every loss asks for the model's own choice at positions where the model was speaking. A chain of drafts is right only as
far as it equals what the model would say; half of the goal is therefore the likeliest token alone, and half the whole
distribution, which sampled answers need.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from troupellm.training.batches import token_id
from troupellm.training.documents import END_OF_TEXT
from troupellm.training.drafters_network import HEADS, SMALL, Eagle, Medusa
from troupellm.training.drafters_texts import Text, read
from troupellm.training.network import Network

LENGTH = 512
DEPTH = 4
"""Links of EAGLE's chain in training."""
LINK_WEIGHT, FEATURE_WEIGHT = 0.85, 0.1
"""Loss weights: of each further link relative to the one before it, and of the feature relative to the token."""


@dataclass(frozen=True, slots=True)
class Row:
    """Texts one after another, up to a length; ``own`` says which tokens the model wrote."""

    ids: list[int]
    own: list[bool]


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch of rows as the model sees it.

    ``tokens`` [rows, length]; ``features`` [rows, length, size], after the last norm; ``at`` [positions], flat indices
    whose next token the model wrote, none of them among the first of a row; ``goal`` [positions, vocabulary], the
    distribution to learn of that next token.
    """

    tokens: Tensor
    features: Tensor
    at: Tensor
    goal: Tensor


def pack(texts: list[Text], separator: list[int], end: int) -> list[Row]:
    """Texts into as few rows as first-fit decreasing needs; what is longer than a row is cut."""
    rows: list[Row] = []
    for text in sorted(texts, key=lambda text: -len(text.ids)):
        ids = text.ids + (separator if text.ids[-1] != end else [])
        own = [text.start <= at < len(text.ids) for at in range(len(ids))]
        room = next((row for row in rows if len(row.ids) + len(ids) <= LENGTH), None)
        if room is None:
            rows.append(room := Row([], []))
        room.ids.extend(ids[:LENGTH])
        room.own.extend(own[:LENGTH])
    return rows


class Lessons:
    """Batches out of a folder of shards from the ``first`` on, in an order that a seed decides."""

    def __init__(self, target: Network, tokenizer: Tokenizer, folder: Path, rows: int, first: int = 0) -> None:
        self._target, self._folder, self._rows, self._first = target, folder, rows, first
        self._end = token_id(tokenizer, END_OF_TEXT)
        self._separator = [*tokenizer.encode("\n").ids, self._end]

    def batches(self, seed: int) -> Iterator[Lesson]:
        """All shards again and again; shards that come into the folder meanwhile join at the next round."""
        rng = random.Random(seed)
        while True:
            rows: list[Row] = []
            for path in sorted(self._folder.glob("[0-9]*.safetensors"))[self._first :]:
                rows += pack(read(path), self._separator, self._end)
            rng.shuffle(rows)
            for at in range(0, len(rows) - self._rows + 1, self._rows):
                yield self.lesson(rows[at : at + self._rows])

    @torch.no_grad()
    def lesson(self, rows: list[Row]) -> Lesson:
        """The model's view of a batch of rows, which are filled up at their ends."""
        tokens = torch.tensor([row.ids + [self._end] * (LENGTH - len(row.ids)) for row in rows])
        own = torch.tensor([row.own + [False] * (LENGTH - len(row.own)) for row in rows])
        told = torch.cat((own[:, 1:], torch.zeros_like(own[:, :1])), dim=1)
        told[:, : DEPTH + 1] = False
        with torch.autocast("cpu", torch.bfloat16):
            features = self._target(tokens)
            at = told.flatten().nonzero().squeeze(1)
            logits = self._target.logits(features.flatten(0, 1)[at]).float()
        goal = torch.softmax(logits, -1) * 0.5
        goal.scatter_add_(1, logits.argmax(-1, keepdim=True), torch.full((len(at), 1), 0.5))
        return Lesson(tokens, features, at, goal)


def eagle_loss(target: Network, head: Eagle, lesson: Lesson) -> Tensor:
    """Over all links of the chains; a small part of it holds the foretold features near the true ones."""
    embedded = target.embedding(lesson.tokens)[:, 1:]
    chain = head.chain(embedded, lesson.features[:, :-1], DEPTH)
    rows, length, size = lesson.features.shape
    # The entry of a row's index i foretells the feature of position i + 1.
    true = lesson.features.flatten(0, 1)[lesson.at]
    place = lesson.at - torch.div(lesson.at, length, rounding_mode="floor") - 1
    total, weight, weights = torch.zeros(()), 1.0, 0.0
    for link in chain:
        foretold = link.reshape(rows * (length - 1), size)[place]
        apart = F.smooth_l1_loss(foretold.float(), true)
        total = total + weight * (_apart(target, foretold, lesson.goal) + FEATURE_WEIGHT * apart)
        weight, weights = weight * LINK_WEIGHT, weights + weight
    return total / weights


def medusa_loss(target: Network, heads: Medusa, lesson: Lesson) -> Tensor:
    """The mean over the heads; head n looks from n + 1 positions before."""
    flat = lesson.features.flatten(0, 1)
    losses = [_apart(target, heads(flat[lesson.at - 1 - head], head), lesson.goal) for head in range(HEADS)]
    return torch.stack(losses).mean()


def draft_loss(small: Network, lesson: Lesson) -> Tensor:
    """Of a model that reads the same tokens."""
    return _apart(small, small(lesson.tokens).flatten(0, 1)[lesson.at], lesson.goal)


def _apart(head: Network, hidden: Tensor, goal: Tensor) -> Tensor:
    return F.cross_entropy(head.logits(hidden).float(), goal)


def pupils(target: Network) -> dict[str, nn.Module]:
    """All three drafters, fresh."""
    return {"eagle": Eagle(target), "medusa": Medusa(target), "draft_model": Network(SMALL)}
