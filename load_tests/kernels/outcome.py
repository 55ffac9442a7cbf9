"""The result of one case of an operation, beside the expected one."""

import msgspec
import torch
from torch import Tensor


class Outcome(msgspec.Struct, frozen=True):
    """The result of a case and the expected one; without a tolerance they must be equal."""

    case: str
    got: Tensor
    expected: Tensor
    tolerance: float = 0.0
    """Of one and of the number that is expected, added up; or of the largest number alone, see `by_largest`."""
    by_largest: bool = False

    def error(self) -> float:
        got, expected = self.got.float().cpu(), self.expected.float().cpu()
        if got.shape != expected.shape or not torch.equal(got.isnan(), expected.isnan()):
            return float("inf")
        got, expected = got.nan_to_num(), expected.nan_to_num()
        if not self.tolerance:
            return 0.0 if torch.equal(got, expected) else float("inf")
        allowed = expected.abs().max() if self.by_largest else 1 + expected.abs()
        return float(((got - expected).abs() / (self.tolerance * allowed)).max())
