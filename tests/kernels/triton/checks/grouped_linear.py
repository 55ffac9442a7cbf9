"""Grouped products against the reference, where rows of no group hold NaN."""

import pytest
import torch

from troupellm.kernels.common.triton import check_device
from troupellm.kernels.grouped_linear.cases import CASES, Case, make_inputs
from troupellm.kernels.grouped_linear.reference import grouped_linear_reference
from troupellm.kernels.grouped_linear.triton_grouped import grouped_linear_triton

DEVICE = str(check_device())


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_grouped_products_equal_the_reference(case: Case) -> None:
    x, weights, rows, starts, out, scales = make_inputs(case, DEVICE, 1)
    expected = out.clone()
    grouped_linear_reference(x, weights, rows, starts, expected, scales=scales)
    grouped_linear_triton(x, weights, rows, starts, out, scales=scales)
    torch.testing.assert_close(out, expected, atol=case.tolerance, rtol=case.tolerance)
    untouched = torch.ones(out.shape[0], dtype=torch.bool, device=DEVICE)
    untouched[rows.long()] = False
    assert torch.equal(out[untouched], expected[untouched])
    assert not out.isnan().any()


def test_groups_may_change_under_a_graph() -> None:
    """Fewer rows are in groups than there is room for: what lies behind the last start has no effect."""
    case = CASES[1]
    x, weights, rows, starts, out, _ = make_inputs(case, DEVICE, 2)
    fewer = starts.clamp(max=3)
    expected = out.clone()
    grouped_linear_reference(x, weights, rows, fewer, expected)
    grouped_linear_triton(x, weights, rows, fewer, out)
    torch.testing.assert_close(out, expected, atol=case.tolerance, rtol=case.tolerance)
