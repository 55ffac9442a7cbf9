"""The short convolution against its definition, with states of NaN in the slots that no row has."""

import pytest
import torch

from troupellm.kernels.common.triton import check_device
from troupellm.kernels.short_conv.cases import CASES, Case, make_inputs
from troupellm.kernels.short_conv.reference import short_conv_reference
from troupellm.kernels.short_conv.triton_conv import short_conv_triton

DEVICE = str(check_device())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_and_states_equal_the_reference(case: Case) -> None:
    x, weight, bias, state, spans = make_inputs(case, DEVICE, 1)
    unused = torch.ones(state.shape[0], dtype=torch.bool, device=DEVICE)
    unused[spans.slots] = False
    state[unused] = float("nan")
    kept = state.clone()
    expected = short_conv_reference(x, weight, bias, kept, spans)
    got = short_conv_triton(x, weight, bias, state, spans)
    torch.testing.assert_close(got.float(), expected.float(), atol=case.tolerance, rtol=case.tolerance)
    assert torch.equal(state[spans.slots], kept[spans.slots])
    assert state[unused].isnan().all()
