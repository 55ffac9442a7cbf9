"""Cases for the tests and the benchmark of gelu_mul: those of the other gate."""

from troupellm.kernels.gated_act.silu_cases import CASES, Case, make_inputs

__all__ = ["CASES", "Case", "make_inputs"]
