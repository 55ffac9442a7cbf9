"""Embeddings of encoded images, kept as the plans say: the scheduler knows at every time what is here."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from troupellm.models.batch.row_table import PlanError
from troupellm.protocol.messages.media import MediaSpan
from troupellm.protocol.messages.worker import StepPlan

if TYPE_CHECKING:
    from troupellm.models.media.tower import Tower


class EncoderCache:
    """Belongs to one runner. All calls come from its thread."""

    def __init__(self, tower: "Tower") -> None:
        self._tower = tower
        self._vectors: dict[bytes, Tensor] = {}

    def apply(self, plan: StepPlan) -> None:
        """Forget and encode the items that a plan names."""
        for digest in plan.forgotten:
            self._vectors.pop(digest, None)
        for item in plan.encode:
            self._vectors[item.digest] = self._tower.encode(item)

    def within(self, spans: Iterable[MediaSpan], start: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The positions [places] of a prompt that lie in its spans, counted from `start` on, and their embeddings
        [places, hidden].

        Raises:
            PlanError: no plan has had an item encoded.
        """
        for span in spans:
            begin, end = max(span.start, start), min(span.end, start + count)
            if begin >= end:
                continue
            vectors = self._vectors.get(span.digest)
            if vectors is None:
                raise PlanError(f"an image of {span.count} positions was not encoded")
            first = span.first - span.start
            yield torch.arange(begin - start, end - start), vectors[first + begin : first + end]


def apply_media(cache: EncoderCache | None, plan: StepPlan) -> None:
    """As `EncoderCache.apply`.

    Raises:
        PlanError: the plan has images, and this worker has no encoder.
    """
    if cache is None:
        raise PlanError(f"step {plan.step}: this worker encodes no images")
    cache.apply(plan)
