"""Penalties of rows whose tokens are on the device: occurrences are counted there, so that no step waits for them.

No counts are kept between steps: they follow from the tokens, which a step in flight may still be writing.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.sampling.adjust import penalize, tally
from troupellm.kernels.sampling.search import row_best
from troupellm.models.sampling.row_options import RowOptions
from troupellm.models.sampling.sampling_batch import SMALLEST_PENALTY

ROW, SLOT, END, SKIP, PROMPT, FACTORS = range(6)
"""Of the columns: index among the rows that sample, slot, tokens that the row has, how many of them are not looked at,
how many are its prompt; and from FACTORS on four float32 as bits: repetition, frequency, presence, nothing."""


class PenaltyTensors:
    """The penalties of the slots' rows; rows without penalties cost nothing."""

    def __init__(self) -> None:
        self._asked: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._values: NDArray[np.int64] = np.zeros((4, 0), np.int64)

    def put(self, slot: int, options: RowOptions) -> None:
        """A row got a slot, or new options."""
        if slot >= self._asked.size:
            more = max(2 * self._asked.size, slot + 1, 16) - self._asked.size
            self._asked = np.concatenate((self._asked, np.zeros(more, np.bool_)))
            self._values = np.concatenate((self._values, np.zeros((4, more), np.int64)), axis=1)
        self._asked[slot] = options.penalized
        state, prompt = options.state, options.num_prompt_tokens
        repetition = max(state.repetition_penalty, SMALLEST_PENALTY)
        factors = np.array([repetition, state.frequency_penalty, state.presence_penalty, 0.0], np.float32)
        self._values[:, slot] = (0 if options.known else prompt, prompt, *factors.view(np.int64))

    def among(self, slots: NDArray[np.int64]) -> bool:
        """True if any of these rows has a penalty."""
        return bool(self._asked[slots].any())

    def of(self, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Columns [FACTORS + 2, penalized rows] of rows that sample.

        Args:
            ends: how many tokens each of the rows has.
        """
        rows = np.flatnonzero(self._asked[slots])
        return np.concatenate((np.stack((rows, slots[rows], ends[rows])), self._values[:, slots[rows]]))


def penalize_rows(logits: Tensor, columns: Tensor, texts: Tensor, longest: int) -> Tensor:
    """Change the logits of rows by their own tokens, in place and without a wait for the device.

    Args:
        logits: float32 [rows, vocab].
        columns: int64 [FACTORS + 2, penalized rows], on the device.
        texts: int32 [slots, length], every row's tokens.
        longest: no row has more tokens.

    Returns:
        bool [rows]: whether a row's logits were fit to choose from before; penalties make a finite number of an
        infinite one.
    """
    sound = row_best(logits)[1].abs() < torch.inf
    places = (columns[SLOT], columns[SKIP], columns[PROMPT], columns[END])
    counts, seen = tally(texts, *places, vocab=logits.shape[1], longest=longest)
    factors = columns[FACTORS:].t().contiguous().view(torch.float32)
    penalize(logits, columns[ROW], counts, seen, *(factors[:, number].contiguous() for number in range(3)))
    return sound
