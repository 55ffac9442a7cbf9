"""What guides tell the sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from troupellm.protocol.worker import RowError


@dataclass(frozen=True)
class TokenMasks:
    """What the guided rows of a step may draw."""

    index: Tensor
    """int64 [guided], which of the step's sampled rows they are, rising."""
    bits: Tensor
    """int32 [guided, words]: what may be drawn, as for `kernels.sampling.adjust.keep_bits`."""
    reasons: Mapping[int, RowError]
    """By index among the sampled rows: what to say if such a row finds no token."""


@dataclass(frozen=True)
class Advanced:
    """What followed from the tokens that guided rows drew."""

    finished: Sequence[int]
    """Rows whose grammar is complete."""
    forced: Mapping[int, Sequence[int]]
    """By row, tokens that must come next and need not be drawn: the row has them now."""
    kept: Mapping[int, int]
    """By row, how many of its tokens count, where its grammar was complete before the last one."""
