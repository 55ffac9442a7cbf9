"""Shapes and types that the tests and the benchmark of row_codes share; the result is exact."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rows: int
    size: int
    dtype: torch.dtype
    codes: torch.dtype


CASES = (
    Case("one_row", 1, 64, torch.float32, torch.int8),
    Case("odd_size", 7, 65, torch.float32, torch.int8),
    Case("fp8", 5, 96, torch.float32, torch.float8_e4m3fn),
    Case("bfloat16", 5, 1100, torch.bfloat16, torch.int8),
    Case("bfloat16_fp8", 3, 128, torch.bfloat16, torch.float8_e4m3fn),
    Case("float16", 3, 33, torch.float16, torch.int8),
)


def make_inputs(case: Case, device: str, seed: int) -> Tensor:
    """[rows, size]; the last row is zeros where there are several."""
    x = torch.randn(case.rows, case.size, generator=torch.Generator().manual_seed(seed))
    if case.rows > 1:
        x[-1] = 0
    return x.to(device, case.dtype)
