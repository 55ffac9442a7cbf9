"""One launch of a tiny Triton kernel: Triton compiles a launcher in C at its first launch, which needs a C compiler and
Python's headers on the machine that serves."""

import torch

from troupellm.kernels.common.triton import usable

ELEMENTS = 16


def launch_error(device: torch.device) -> str:
    """Launch a kernel and read its result.

    Returns:
        one line: why kernels cannot be launched on `device`; empty if they can.
    """
    if not usable(device):
        return f"triton does not launch kernels on {device.type} here"
    from troupellm.kernels.common.triton_increment import increment_kernel

    try:
        values = torch.arange(ELEMENTS, dtype=torch.int32, device=device)
        increment_kernel[(1,)](values, ELEMENTS=ELEMENTS)
        if values.tolist() != list(range(1, ELEMENTS + 1)):
            return "a kernel that adds one gave other numbers"
    except Exception as error:  # Triton gives a RuntimeError, a failed process, an OSError or an error of its own
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""
