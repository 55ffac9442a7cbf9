"""Products of few rows with a weight that compiled code knows; the calls are the same for all kinds of weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from troupellm.kernels import cpp
from troupellm.kernels.cpp import checks, guard

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True)
class Functions:
    linear: cpp.Function
    gated: cpp.Function


class CppRows:
    """A weight in the form of compiled code; its subclasses set the fields."""

    __slots__ = ()
    out_features: int
    in_features: int
    gates: bool
    _functions: Functions
    _pointer: int
    """Address of the compiled code's struct."""

    def linear(self, x: Tensor, norm: Tensor | None, eps: float, out: Tensor | None, factor: float) -> Tensor:
        """As `FewRows.linear`."""
        rows, stride = checks.rows_of("x", x, self.in_features)
        gain = None if norm is None else checks.address_of_norm(norm, self.in_features)
        adds, out_stride = out is not None, self.out_features
        if out is None:
            out = guard.empty("out", rows, self.out_features)
        else:
            out_stride = checks.check_rows("out", out, rows, self.out_features)
        self._functions.linear(
            self._pointer,
            x.data_ptr(),
            stride,
            rows,
            gain,
            eps,
            adds,
            factor,
            out.data_ptr(),
            out_stride,
            torch.get_num_threads(),
        )
        return out

    def gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str) -> Tensor:
        """As `FewRows.gated`."""
        checks.require(self.gates, f"halves of {self.out_features} outputs cannot be multiplied on the way")
        rows, stride = checks.rows_of("x", x, self.in_features)
        gain = None if norm is None else checks.address_of_norm(norm, self.in_features)
        out = guard.empty("out", rows, self.out_features // 2)
        self._functions.gated(
            self._pointer,
            x.data_ptr(),
            stride,
            rows,
            gain,
            eps,
            ACTIVATIONS[activation],
            out.data_ptr(),
            self.out_features // 2,
            torch.get_num_threads(),
        )
        return out
