"""Sampling options of the rows as numbers that a step reads on the device.

Columns are int64; pairs of float32 and single float64 are stored in them as bits.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.decode_io import Draws, finish
from troupellm.kernels.sampling.truncate import Nucleus
from troupellm.models.gpu.logit_adjustments import Adjustments
from troupellm.models.gpu.logprobs import NOTHING, num_logprobs
from troupellm.models.gpu.penalties import PenaltyTensors
from troupellm.models.sampling.row_options import RowOptions

SLOT, END, COUNT, STREAM, SCALES, TOP_K, TOP_P, ADAPTER = range(8)
WIDTH = 8

GREEDY, DRAWN, CUT, ELSEWHERE = range(4)
"""How a row's token is chosen: the likeliest token; a draw, also with min_p; a draw from the likeliest ones; the
sampler on the host.

Guides, listed tokens, penalties and log-probabilities go with each of the first three, see `choosing`."""


class SamplingTensors:
    """The sampling options of the slots' rows.

    Attributes:
        kinds: int64 [slots], how each row's token is chosen; see `GREEDY`.
        num_logprobs: int64 [slots], the number of log-probabilities that each row gets; see `logprobs.num_logprobs`.
        penalties, adjustments: of those that have any.
    """

    def __init__(self) -> None:
        self.kinds: NDArray[np.int64] = np.zeros(0, np.int64)
        self.num_logprobs: NDArray[np.int64] = np.zeros(0, np.int64)
        self.penalties, self.adjustments = PenaltyTensors(), Adjustments()
        self._values: NDArray[np.int64] = np.zeros((WIDTH, 0), np.int64)

    def put(self, slot: int, options: RowOptions, adapter: int = 0) -> None:
        """A row has a slot, or asks for something else than before. adapter: its adapter slot, 0 is none."""
        if slot >= self.kinds.size:
            more = max(2 * self.kinds.size, slot + 1, 16) - self.kinds.size
            self.kinds = np.concatenate((self.kinds, np.zeros(more, np.int64)))
            self.num_logprobs = np.concatenate((self.num_logprobs, np.full(more, NOTHING, np.int64)))
            self._values = np.concatenate((self._values, np.zeros((WIDTH, more), np.int64)), axis=1)
        count = num_logprobs(options.state)
        self.kinds[slot], self.num_logprobs[slot] = kind_of(options), NOTHING if count is None else count
        self.penalties.put(slot, options)
        self.adjustments.put(slot, options)
        scales = np.array([options.inverse_temperature, options.log_min_p], np.float32)
        top_p = np.array([options.state.top_p], np.float64)
        numbers = (options.stream, scales.view(np.int64)[0], options.top_k, top_p.view(np.int64)[0], adapter)
        self._values[STREAM:, slot] = numbers

    def of(
        self,
        slots: NDArray[np.int64],
        ends: NDArray[np.int64],
        size: int,
        scratch: int,
        counts: NDArray[np.int64] | int = 1,
    ) -> NDArray[np.int64]:
        """Columns [WIDTH, size] of some rows and, behind them, of rows that pad.

        Args:
            ends: keys of each row with this step, which is where its next token goes.
            scratch: slot of the rows that pad.
            counts: tokens of each row, the last ones of its keys.
        """
        found = padding(size, scratch)
        found[:, : slots.size] = self._values[:, slots]
        found[SLOT, : slots.size], found[END, : slots.size], found[COUNT, : slots.size] = slots, ends, counts
        return found


def padding(size: int, scratch: int) -> NDArray[np.int64]:
    """Columns of padding rows: they have no keys, and their tokens go to the scratch slot."""
    found = np.zeros((WIDTH, size), np.int64)
    found[SLOT], found[TOP_K] = scratch, 1
    return found


def kind_of(options: RowOptions) -> int:
    """How the row's token is chosen; ELSEWHERE unless the device alone can do it."""
    state = options.state
    if options.words or options.thinking is not None or options.processors is not None or num_logprobs(state) is None:
        return ELSEWHERE
    if options.greedy:
        return GREEDY
    return DRAWN if options.prefix is None else CUT


def choose(logits: Tensor, columns: Tensor, codes: Tensor, kind: int, texts: Tensor) -> Tensor:
    """One token per row, as `models.sampler` chooses it, without a wait for the device; appended to the row's text.

    Args:
        logits: float32 [rows, vocab]; left as they are.
        columns: int64 [WIDTH, rows].
        codes: `noise.token_codes`.
        kind: the most that any of the rows needs.
        texts: int32 [slots, length], every row's tokens; written to.

    Returns:
        int64 [rows]; -1 where the logits are not fit to choose from.
    """
    draws: Draws | None = None
    if kind >= DRAWN:
        scales = columns[SCALES].contiguous().view(torch.float32).view(-1, 2)
        nucleus = None
        if kind == CUT:
            top_p = columns[TOP_P].contiguous().view(torch.float64)
            nucleus = Nucleus(columns[TOP_K][:, None], top_p[:, None])
        draws = Draws(scales, columns[STREAM], codes, nucleus)
    return finish(logits, columns[SLOT], columns[END], texts, draws)
