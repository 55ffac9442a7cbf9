"""Shapes and tolerances that the tests of gated_delta share."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.short_conv.spans import ConvSpans, conv_spans


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    counts: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    tolerance: float = 1e-4


CASES = (
    Case("one_token", (1,), 1, 1, 8, 8),
    Case("decodes", (1,) * 7, 2, 4, 16, 24),
    Case("ragged", (5, 1, 70, 3), 2, 4, 16, 8),
    Case("chunks", (128, 65), 1, 2, 16, 16),
    Case("wide", (9, 1), 1, 2, 128, 128),
    Case("groups", (1, 1, 1, 1, 1, 9, 1, 1), 4, 8, 64, 64),
    Case("large_states", (1, 1, 2), 16, 32, 128, 128),
)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, ConvSpans]


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """The arguments of `gated_delta`; keys have length 1, and there are more slots than rows, in another order."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    tokens, rows = sum(case.counts), len(case.counts)
    slots = torch.randperm(rows + 3, generator=generator)[:rows].to(device)
    spans = conv_spans(slots, torch.tensor(case.counts, device=device), 2)
    return (
        functional.normalize(random(tokens, case.key_heads, case.key_size), dim=-1) * case.key_size**-0.5,
        functional.normalize(random(tokens, case.key_heads, case.key_size), dim=-1),
        random(tokens, case.value_heads, case.value_size),
        -functional.softplus(random(tokens, case.value_heads)),
        random(tokens, case.value_heads).sigmoid(),
        random(rows + 3, case.value_heads, case.key_size, case.value_size),
        spans,
    )
