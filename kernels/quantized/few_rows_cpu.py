"""Few rows times a weight that compiled code was told of once: the calls, whatever the weight looks like."""

from dataclasses import dataclass

import torch
from torch import Tensor

from troupellm.kernels import native

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True)
class Functions:
    linear: native.Function
    gated: native.Function


class ToldWeight:
    """What is made of one is set by whoever derives from it."""

    __slots__ = ()
    out_features: int
    _functions: Functions
    _pointer: int
    """To what the compiled code is told."""

    def linear(self, x: Tensor, norm: Tensor | None, eps: float, out: Tensor | None, factor: float) -> Tensor:
        """As `FewRows.linear`."""
        adds = out is not None
        if out is None:
            out = torch.empty(x.shape[0], self.out_features, dtype=torch.float32)
        self._functions.linear(
            self._pointer, x.data_ptr(), x.stride(0), x.shape[0], None if norm is None else norm.data_ptr(), eps, adds,
            factor, out.data_ptr(), out.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str) -> Tensor:
        """As `FewRows.gated`."""
        out = torch.empty(x.shape[0], self.out_features // 2, dtype=torch.float32)
        self._functions.gated(
            self._pointer, x.data_ptr(), x.stride(0), x.shape[0], None if norm is None else norm.data_ptr(), eps,
            ACTIVATIONS[activation], out.data_ptr(), out.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        return out
