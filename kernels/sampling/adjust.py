"""Changes to logits before sampling, at listed places only.

A place is row * vocab + token in the flat view of contiguous logits [rows, vocab], int64.
"""

import torch
from torch import Tensor


def keep_only(logits: Tensor, rows: Tensor, places: Tensor) -> None:
    """Mask all of `rows` (int64) but the given places, in place."""
    flat = logits.view(-1)
    kept = flat[places]
    logits.index_fill_(0, rows, -torch.inf)
    flat[places] = kept


def forbid(logits: Tensor, rows: Tensor, forbidden: Tensor) -> None:
    """Mask tokens of some rows, in place.

    Args:
        rows: int64 [n], rising and without repeats.
        forbidden: bool [n, vocab].
    """
    if rows.numel() == logits.shape[0]:
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))


def add_at(logits: Tensor, places: Tensor, values: Tensor) -> None:
    """Add float32 values, -inf to mask, in place. Adding, unlike writing, gives repeated places a defined result."""
    logits.view(-1).index_add_(0, places, values)


def repeat_penalty(logits: Tensor, places: Tensor, penalties: Tensor) -> None:
    """Divide positive and multiply negative logits by a factor, in place, once however often a place is listed.

    Args:
        places: [n].
        penalties: float32 [n], above 0; the same for equal places.
    """
    flat = logits.view(-1)
    values = flat[places]
    values = torch.where(values > 0, values / penalties, values * penalties)
    flat[places] = values.clamp_(max=torch.finfo(values.dtype).max)


def occurrence_penalty(
    logits: Tensor, places: Tensor, frequency: Tensor, presence: Tensor, counters: Tensor, slots: Tensor
) -> None:
    """Subtract presence + frequency * occurrences, where each listing of a place is one occurrence, in place.

    Args:
        places: [n].
        frequency, presence: float32 [n]; the same for equal places.
        counters: float32 zeros [slots], used up.
        slots: int64 [n], which counter belongs to each place.
    """
    flat = logits.view(-1)
    counters.index_add_(0, slots, torch.ones_like(frequency))
    flat[places] = flat[places] - frequency * counters[slots] - presence


def matches(tails: Tensor, prefixes: Tensor) -> Tensor:
    """bool [words]: whether each text ends in its prefix.

    Args:
        tails: last tokens, int64 [words, n], right-aligned and filled up with -1.
        prefixes: int64 [words, n], right-aligned and filled up with -2, which matches anything.
    """
    return ((tails == prefixes) | (prefixes == -2)).all(1)
