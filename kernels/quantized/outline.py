"""A quantized weight without its numbers: what decides how products with it are computed, and what it takes."""

from dataclasses import dataclass
from typing import Literal

Code = Literal["int8", "int4", "table4", "fp8", "fp8_e5m2", "mxfp4", "mxfp6", "mxfp8", "mxfp8_e5m2"]
"""The form of one weight; fp8 and mxfp8 alone are e4m3, table4 is a place among 16 values that do not count up."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Known from a weight, and before it is read from the header of the file that it is in."""

    code: Code
    rows: int
    columns: int
    group: int
    """Inputs that share a scale."""
    offsets: bool = False
    """Whether groups have a zero point or a minimum, too."""
    ordered: bool = False
    """Whether inputs lie in other groups than their neighbours."""
    eight_bit_inputs: bool = False
    """Whether products may put their inputs into eight bits as well."""

    @property
    def groups(self) -> int:
        """Scales of one output."""
        return -(-self.columns // max(1, self.group))
