"""The gate of a gated feed-forward layer."""

from torch import Tensor
from torch.nn import functional

from troupellm.kernels.silu_mul.reference import silu_mul_reference


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension.

    Args:
        gate_up: [tokens, 2 * size], any float type; left as it is.

    Returns:
        [tokens, size], contiguous.
    """
    if gate_up.device.type != "cpu":
        return silu_mul_reference(gate_up)
    size = gate_up.shape[-1] // 2
    return functional.silu(gate_up[..., :size]).mul_(gate_up[..., size:])
