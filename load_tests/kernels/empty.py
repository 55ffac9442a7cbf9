"""A kernel that does nothing, for the cost of launching one."""

from collections.abc import Callable

import torch

from troupellm.kernels.common.triton import usable


def empty(device: torch.device) -> Callable[[], object]:
    """Launches it: Triton's, or where that is not there the addition of one number."""
    if usable(device):
        from troupellm.load_tests.kernels.triton_empty import empty_kernel

        place = torch.zeros(1, device=device)
        return lambda: empty_kernel[(1,)](place, num_warps=1)
    number = torch.zeros(1, device=device)
    return lambda: number.add_(0.0)
