"""Cases for the tests and the benchmark of gelu_mul: those of the other gate."""

from troupellm.kernels.silu_mul.cases import CASES, Case, make_inputs

__all__ = ["CASES", "Case", "make_inputs"]
