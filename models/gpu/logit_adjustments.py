"""Applies allowed, forbidden and biased token ids to logits on the device, without waiting for the device.

The change at a position follows from the row's number of tokens, which the host knows before it knows the tokens.
"""

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.sampling.adjust import add_at, keep_only
from troupellm.models.gpu.host_transfer import Ints, Staging, doubled
from troupellm.models.sampling.row_options import RowOptions


class Adjustments:
    """The token lists that the slots' rows ask for."""

    def __init__(self) -> None:
        self._asked: dict[int, RowOptions] = {}

    def put(self, slot: int, options: RowOptions) -> None:
        """A row got a slot, or new options."""
        if options.allowed.numel() or options.stops.numel() or options.additions:
            self._asked[slot] = options
        else:
            self._asked.pop(slot, None)

    def among(self, slots: Ints) -> bool:
        """True if any of these rows has a token list."""
        return bool(self._asked) and not self._asked.keys().isdisjoint(slots.tolist())

    def apply(self, logits: Tensor, slots: Ints, ends: Ints, staging: Staging) -> None:
        """In place.

        Args:
            logits: float32 [rows, vocab], contiguous.
            slots: of the rows.
            ends: tokens that each row has.
        """
        vocab, none = logits.shape[1], np.zeros(0, np.int64)
        rows, allowed, places, values = [none], [none], [none], [np.zeros(0, np.float32)]
        for row, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
            options = self._asked.get(slot)
            if options is None:
                continue
            if options.allowed.numel():
                rows.append(np.array([row]))
                allowed.append(options.allowed.numpy() + row * vocab)
            if options.stops.numel() and end < options.min_length:
                places.append(options.stops.numpy() + row * vocab)
                values.append(np.full(options.stops.numel(), -np.inf, np.float32))
            if options.additions:
                places.append(np.fromiter(options.additions, np.int64) + row * vocab)
                values.append(np.fromiter(options.additions.values(), np.float32))
        added = np.concatenate(values)
        sent = staging.send(*map(np.concatenate, (rows, allowed, places)), doubled(added))
        if sent[0].numel():
            keep_only(logits, sent[0], sent[1])
        if added.size:
            add_at(logits, sent[2], sent[3].view(torch.float32)[: added.size])
