"""Both ends of a decode step against the reference, over memory of NaN and of indices that are nowhere."""

import pytest
import torch

from troupellm.kernels.common.triton import check_device
from troupellm.kernels.decode_io.cases import CASES, Case, make_inputs
from troupellm.kernels.decode_io.reference import begin_reference, finish_reference
from troupellm.kernels.decode_io.triton_inputs import begin_triton
from troupellm.kernels.decode_io.triton_outputs import finish_triton
from troupellm.tests.support.kernels.poisoned_rows import poisoned_memory

__all__ = ["poisoned_memory"]
DEVICE = str(check_device())
EACH = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])


@EACH
def test_begins_as_the_reference(case: Case) -> None:
    made = make_inputs(case, DEVICE, 1)
    far = made.block_tables | 2**30  # whose rows take more than 32 bits
    given = (made.slots, made.ends, made.counts, made.texts, far, made.angle_table)
    sizes = {"queries": case.queries, "block_size": case.block_size, "kv_heads": case.kv_heads}
    got = begin_triton(*given, **sizes, scratch=made.scratch)
    expected = begin_reference(*given, **sizes, scratch=made.scratch)
    for name, mine, wanted in zip(got._fields, got, expected, strict=True):
        assert (mine is None) == (wanted is None)
        if mine is None or name == "tables":
            continue
        assert mine.dtype == wanted.dtype, name
        assert torch.equal(mine, wanted), name
    assert got.tables.shape == expected.tables.shape
    for row, end in enumerate(case.ends):
        needed = -(-end // case.block_size)
        assert torch.equal(got.tables[:, row, :needed], expected.tables[:, row, :needed])
        assert (got.tables[:, row, needed:] == -7).all()


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name == "cut" else ()) for case in CASES]
)
def test_finishes_as_the_reference(case: Case) -> None:
    made, host = make_inputs(case, DEVICE, 2), make_inputs(case, "cpu", 2)
    wide = torch.full((len(case.ends), case.vocab + 9), float("nan"), device=DEVICE)
    wide[:, 4:-5] = made.logits
    texts, before = made.texts.clone(), made.logits.clone()
    got = finish_triton(wide[:, 4:-5], made.slots, made.ends, texts, made.draws)
    expected = finish_reference(host.logits, host.slots, host.ends, host.texts, host.draws)
    torch.testing.assert_close(made.logits, before, rtol=0, atol=0, equal_nan=True)
    assert got.dtype == expected.dtype == torch.int64
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(texts.cpu(), host.texts)
    if len(case.ends) > 2:
        assert got[1:3].tolist() == [-1, -1]
