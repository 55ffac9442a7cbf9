"""Embeddings of encoded images, kept as the plans say: the scheduler knows at every time what is here."""

from torch import Tensor

from troupellm.models.media.tower import Tower
from troupellm.protocol.messages.media import MediaSpan
from troupellm.protocol.messages.worker import StepPlan


class MissingMedia(RuntimeError):
    """A plan names embeddings that no plan has had made: a fault of the scheduler."""


class EncoderCache:
    """Belongs to one runner. All calls come from its thread."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self._vectors: dict[bytes, Tensor] = {}

    def apply(self, plan: StepPlan) -> None:
        """Forget and encode the items that a plan names."""
        for digest in plan.forgotten:
            self._vectors.pop(digest, None)
        for item in plan.encode:
            self._vectors[item.digest] = self._tower.encode(item)

    def part(self, span: MediaSpan, begin: int, end: int) -> Tensor:
        """The embeddings [end - begin, hidden] of positions of a prompt within a span.

        Raises:
            MissingMedia: the item is not here.
        """
        vectors = self._vectors.get(span.digest)
        if vectors is None:
            raise MissingMedia(f"an image of {span.count} positions was not encoded")
        first = span.first - span.start
        return vectors[first + begin : first + end]
