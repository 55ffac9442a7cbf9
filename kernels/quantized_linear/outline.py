"""A quantized weight without its numbers: the properties that decide its products and its memory."""

from dataclasses import dataclass
from typing import Literal

Code = Literal["int8", "int4", "table4", "float4", "fp8", "fp8_e5m2", "mxfp4", "mxfp6", "mxfp8", "mxfp8_e5m2"]
"""The form of one weight; fp8 and mxfp8 alone are e4m3. table4 and float4 are places among 16 values that do not count
up: small whole numbers, or any."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Known from a weight, and before it is read from the header of the file that it is in."""

    code: Code
    rows: int
    columns: int
    group: int
    """Inputs that share a scale."""
    offsets: bool = False
    """True if groups also have a zero point or a minimum."""
    ordered: bool = False
    """True if inputs may be in other groups than their neighbours."""
    eight_bit_inputs: bool = False
    """True if products may also convert their inputs to eight bits."""
    row_bytes: int = 0
    """Bytes of a row where a CPU's products read blocks of a GGUF file in about their own size; 0: by the code."""

    @property
    def groups(self) -> int:
        """Scales of one output."""
        return -(-self.columns // max(1, self.group))

    @property
    def decodable(self) -> bool:
        """True if `packed_weights.packed_weight` can convert it: pairs of inputs share a scale, and the type is neither
        e5m2 nor float4."""
        pairs = self.group > 0 and self.group % 2 == 0 and self.columns % self.group == 0
        return pairs and not self.code.endswith("e5m2") and self.code != "float4"
