"""Copies numbers between host and device for a proposer. Only `to_host` waits for the device."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device; on a CPU their memory is shared, on a GPU the copy is only begun."""
    found = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cuda":
        return found.pin_memory().to(device, non_blocking=True)
    return found.to(device)


def to_host(values: Tensor) -> NDArray[Any]:
    """Numbers of the device, when all that was launched before is done; on a CPU their memory is shared."""
    found: NDArray[Any] = values.cpu().numpy()
    return found
