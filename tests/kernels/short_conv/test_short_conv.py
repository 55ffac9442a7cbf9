"""The convolution against its definition, against torch's own, and cut in any way."""

import pytest
import torch
from torch.nn import functional

from troupellm.kernels.short_conv import short_conv
from troupellm.kernels.short_conv.cases import CASES, Case, make_inputs
from troupellm.kernels.short_conv.reference import short_conv_reference
from troupellm.kernels.short_conv.spans import conv_spans


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_and_states_equal_the_reference(case: Case) -> None:
    x, weight, bias, state, spans = make_inputs(case, "cpu", 1)
    before, expected_state = x.clone(), state.clone()
    expected = short_conv_reference(x, weight, bias, expected_state, spans)
    got = short_conv(x, weight, bias, state, spans)
    assert got.dtype == case.dtype
    torch.testing.assert_close(got.float(), expected.float(), atol=case.tolerance, rtol=case.tolerance)
    assert torch.equal(state, expected_state)
    assert torch.equal(x, before)


def test_a_row_that_begins_with_zeros_is_a_padded_convolution() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(21, 6, generator=generator), torch.randn(4, 6, generator=generator)
    spans = conv_spans(torch.tensor([1]), torch.tensor([21]), 4)
    got = short_conv(x, weight, None, torch.zeros(2, 3, 6), spans)
    expected = functional.conv1d(functional.pad(x.T[None], (3, 0)), weight.T[:, None], groups=6)[0].T
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("cuts", [(40,), (1,) * 40, (7, 16, 17), (1, 2, 37), (39, 1)])
def test_every_cut_of_a_row_gives_the_same_bits(cuts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((40, 9), (4, 9), (9,)))
    state = torch.zeros(1, 3, 9)
    whole = short_conv(x, weight, bias, state, conv_spans(torch.tensor([0]), torch.tensor([40]), 4))
    parts, slots = torch.zeros(3, 3, 9), torch.tensor([2])
    pieces = [
        short_conv(part, weight, bias, parts, conv_spans(slots, torch.tensor([len(part)]), 4))
        for part in x.split(list(cuts))
    ]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(parts[2], state[0])
    assert not parts[:2].any()
