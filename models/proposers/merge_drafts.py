"""Merges the drafts of parts of a batch into those of the whole batch."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.proposers.paged_attention import Ints


def spread(found: Drafts, rows: Ints, total: int) -> Drafts:
    """The drafts of some rows among those of all."""

    def among(part: NDArray[np.generic]) -> NDArray[np.generic]:
        whole = np.zeros((total, *part.shape[1:]), dtype=part.dtype)
        whole[rows] = part
        return whole

    return Drafts(
        token_ids=among(found.token_ids),  # type: ignore[arg-type]
        counts=among(found.counts),  # type: ignore[arg-type]
        parents=None if found.parents is None else among(found.parents),  # type: ignore[arg-type]
        confidence=None if found.confidence is None else among(found.confidence),  # type: ignore[arg-type]
    )


def as_trees(found: Drafts) -> Drafts:
    """Chains as trees without branches."""
    if found.parents is not None:
        return found
    parents = np.broadcast_to(np.arange(-1, found.token_ids.shape[1] - 1, dtype=np.int32), found.token_ids.shape)
    return replace(found, parents=parents)


def joined(found: list[Drafts]) -> Drafts:
    """Trees of different rows of the same batch as one, each as wide as the widest."""
    width = max(part.token_ids.shape[1] for part in found)

    def table(name: str) -> NDArray[Any]:
        parts = [getattr(part, name) for part in found]
        padded = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
        owned = [np.where((drafts.counts > 0)[:, None], part, 0) for drafts, part in zip(found, padded, strict=True)]
        summed: NDArray[Any] = np.sum(owned, axis=0, dtype=parts[0].dtype)
        return summed

    counts = np.sum([part.counts for part in found], axis=0)
    return Drafts(table("token_ids"), counts, table("parents"))
