"""Copies numbers between host and device: one copy to the device and one back for each step."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.gpu.device import Device

Ints = NDArray[np.int64]

FIRST_SIZE = 1 << 16


def doubled(values: NDArray[np.int32] | NDArray[np.float32]) -> Ints:
    """Numbers of 4 bytes, two in each one of 8 and zeros behind them, so that they can be sent."""
    found = np.zeros(-(-values.size // 2), np.int64)
    found.view(values.dtype)[: values.size] = values.reshape(-1)
    return found


class Staging:
    """Pinned memory that steps use in turns: a step's inputs stay unchanged until its result was collected."""

    def __init__(self, device: Device, turns: int) -> None:
        """turns: steps that may be under way, and one."""
        self._device = device
        self._arenas = [device.pinned(FIRST_SIZE) for _ in range(turns)]
        self._turn, self._used = 0, 0

    def next_step(self) -> None:
        """The step that had this turn before has been collected."""
        self._turn, self._used = (self._turn + 1) % len(self._arenas), 0

    def send(self, *parts: Ints, into: Tensor | None = None) -> list[Tensor]:
        """Copy numbers to the device, all in one go and without a wait.

        Args:
            parts: int64, any shapes.
            into: int64 [n] on the device, whose beginning is written where all of them fit; else it is fresh memory.

        Returns:
            the parts on the device, in their shapes.
        """
        total = sum(part.size for part in parts)
        arena = self._arenas[self._turn]
        if self._used + total > arena.numel():
            # Copies from the old one may be under way: torch keeps pinned memory until they are done.
            arena = self._arenas[self._turn] = self._device.pinned(2 * (self._used + total))
            self._used = 0
        here = arena[self._used : self._used + total]
        self._used += total
        np.concatenate([part.reshape(-1) for part in parts], out=here.numpy())
        if into is not None and total <= into.numel():
            there = into[:total]
        else:
            there = torch.empty(total, dtype=torch.int64, device=self._device.torch_device)
        there.copy_(here, non_blocking=True)
        found, begin = [], 0
        for part in parts:
            found.append(there[begin : begin + part.size].view(part.shape))
            begin += part.size
        return found


class Results:
    """Pinned memory for the steps' results."""

    def __init__(self, device: Device, turns: int, rows: int) -> None:
        self._device = device
        self._places = [device.pinned(rows) for _ in range(turns)]
        self._turn = 0

    def fetch(self, numbers: Tensor) -> Tensor:
        """Copy int64 [rows] up behind all that was launched so far, to memory of the step that had this turn before."""
        self._turn = (self._turn + 1) % len(self._places)
        if self._places[self._turn].numel() < numbers.numel():
            self._places[self._turn] = self._device.pinned(2 * numbers.numel())
        here = self._places[self._turn][: numbers.numel()]
        here.copy_(numbers, non_blocking=True)
        return here
