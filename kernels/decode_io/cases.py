"""Shapes for the tests and the benchmark of the first and last operations of a decode step; the first are exact."""

from dataclasses import dataclass

import torch
from torch import Tensor

from troupellm.kernels.decode_io.spec import Draws
from troupellm.kernels.sampling.noise import stream_key, token_codes
from troupellm.kernels.sampling.truncate import Nucleus


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    ends: tuple[int, ...]
    """Per row, keys with this step; 0 is a row that pads."""
    queries: int = 1
    counts: tuple[int, ...] | None = None
    groups: int = 1
    kv_heads: int = 2
    block_size: int = 16
    angles: int | None = 24
    vocab: int = 300
    draws: bool = False
    cut: bool = False
    """There is top_k and top_p beside min_p."""


CASES = (
    Case("one_row", (1,)),
    Case("ragged", (1, 16, 17, 0, 130, 33), kv_heads=3),
    Case("groups", (40, 7, 0), groups=3, block_size=5, kv_heads=1, angles=10, draws=True),
    Case("verify", (5, 1, 40, 0), queries=4, counts=(4, 1, 2, 0), block_size=8),
    Case("verify_all", (9, 30), queries=3, angles=None, kv_heads=5),
    Case("long", (3000, 1), block_size=1, kv_heads=1, vocab=20_001, draws=True),
    Case("drawn", (12, 3, 9, 64, 0), vocab=8193, draws=True, cut=True),
    Case("cut", (5, 2, 3, 0, 8, 13, 21, 34, 55), vocab=4501, draws=True, cut=True),
)
LENGTH = 3001
"""Length of a row's text."""


@dataclass(frozen=True, slots=True)
class Inputs:
    slots: Tensor
    ends: Tensor
    counts: Tensor | None
    texts: Tensor
    block_tables: Tensor
    angle_table: Tensor | None
    scratch: int
    logits: Tensor
    """float32 [rows, vocab]; of several rows one has equal largest ones, one NaN, and one nothing finite."""
    draws: Draws | None


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Rows in a random order of slots, blocks anywhere."""
    generator, rows = torch.Generator().manual_seed(seed), len(case.ends)
    order, ends = torch.randperm(rows + 2, generator=generator), torch.tensor(case.ends)
    scratch, width = rows + 2, -(-LENGTH // case.block_size)
    slots = torch.where(ends > 0, order[:rows], scratch)
    texts = torch.randint(0, case.vocab, (scratch + 1, LENGTH), generator=generator, dtype=torch.int32)
    blocks = torch.randint(0, 2**16, (case.groups, scratch + 1, width), generator=generator, dtype=torch.int32)
    angles = None if case.angles is None else torch.randn(LENGTH, case.angles, generator=generator)
    logits = torch.randn(rows, case.vocab, generator=generator) * 3
    logits[0, [7, 11, case.vocab - 1]] = 40.0
    if rows > 2:
        logits[1, 13], logits[2] = float("nan"), float("-inf")
    factors = torch.rand(rows, generator=generator) + 0.5
    factors[::3] = 0.0
    scales = torch.stack((factors, torch.full((rows,), -9.0)), dim=1)
    scales[-1, 1] = float("-inf")
    streams = torch.tensor([stream_key(seed, row) for row in range(rows)])
    nucleus = None
    if case.cut:
        order = torch.arange(rows)[:, None]
        top_k = torch.where(order % 2 == 0, 20 + order, case.vocab)
        nucleus = Nucleus(top_k.to(device), (1.0 - 0.04 * order).double().to(device))
    return Inputs(
        slots=slots.to(device),
        ends=ends.to(device),
        counts=None if case.counts is None else torch.tensor(case.counts, device=device),
        texts=texts.to(device),
        block_tables=blocks.to(device),
        angle_table=None if angles is None else angles.to(device),
        scratch=scratch,
        logits=logits.to(device),
        draws=Draws(scales.to(device), streams.to(device), token_codes(case.vocab, torch.device(device)), nucleus)
        if case.draws
        else None,
    )
