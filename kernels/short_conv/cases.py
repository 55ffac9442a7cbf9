"""Shapes, types and tolerances that the tests and the benchmarks of short_conv share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from troupellm.kernels.short_conv.spans import ConvSpans, conv_spans


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    counts: tuple[int, ...]
    channels: int
    taps: int
    dtype: torch.dtype
    tolerance: float
    bias: bool = False


CASES = (
    Case("one_row", (1,), 17, 3, torch.float32, 1e-5),
    Case("decodes", (1,) * 16, 1024, 3, torch.float32, 1e-5),
    Case("ragged", (5, 1, 2, 33, 1), 70, 4, torch.float32, 1e-5, bias=True),
    Case("two_taps", (1, 3), 8, 2, torch.float32, 1e-5),
    Case("bfloat16", (7, 1), 96, 4, torch.bfloat16, 6e-2, bias=True),
    Case("float16", (2, 2), 96, 3, torch.float16, 6e-3),
)

Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor, ConvSpans]


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """The arguments of `short_conv`; there are more slots than rows, in another order."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, case.dtype)

    rows, num_slots = len(case.counts), len(case.counts) + 3
    slots = torch.randperm(num_slots, generator=generator)[:rows].to(device)
    spans = conv_spans(slots, torch.tensor(case.counts, device=device), case.taps)
    x, weight = random(sum(case.counts), case.channels), random(case.taps, case.channels)
    return (
        x,
        weight,
        random(case.channels) if case.bias else None,
        random(num_slots, case.taps - 1, case.channels),
        spans,
    )
