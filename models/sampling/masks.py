"""Data that guides give the sampler and the step's result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from troupellm.protocol.messages.worker import RowError


@dataclass(frozen=True)
class TokenMasks:
    """Masks of the tokens that a step's guided rows may draw."""

    index: Tensor
    """int64 [guided], indices among the step's sampled rows, rising."""
    bits: Tensor
    """int32 [guided, words]: bits of the allowed tokens, as for `kernels.sampling.adjust.keep_bits`."""
    reasons: Mapping[int, RowError]
    """By index among the sampled rows: the error if no token is allowed."""


@dataclass(frozen=True)
class Advanced:
    """The guides' results for the tokens that their rows drew."""

    finished: Sequence[int]
    """Rows whose grammar is complete."""
    forced: Mapping[int, Sequence[int]]
    """By row, tokens that must come next: they are appended without being drawn."""
    kept: Mapping[int, int]
    """By row, the number of its tokens that count, where its grammar was complete before the last one."""
