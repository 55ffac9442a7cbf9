"""Low-rank products equal plain matrix products, however they are computed."""

import numpy as np
import pytest
import torch

from troupellm.kernels.cpp.checks import RefusedCall
from troupellm.kernels.low_rank import low_rank_add
from troupellm.kernels.low_rank.cases import CASES, Case, Inputs, make_inputs
from troupellm.kernels.low_rank.native import LayerWeights, load, low_rank_native, takes_native
from troupellm.kernels.low_rank.reference import low_rank_reference
from troupellm.kernels.low_rank.weights import GroupedRows, HostRows, LowRankWeights, grouped_rows

CPU = torch.device("cpu")


def expected(case: Case, made: Inputs) -> torch.Tensor:
    """Row by row, in double precision."""
    out = made.out.double()
    for row, group in enumerate(case.groups):
        if group < 0 or not case.ranks[group]:
            continue
        if made.weights.factors is not None:
            out[row] *= made.weights.factors[group].double()
        for part, (begin, width) in enumerate(zip(made.weights.begins, made.weights.widths, strict=True)):
            down = made.weights.down[group, part * case.most : (part + 1) * case.most].double()
            added = made.x[row].double() @ down.T @ made.weights.ups[part][group].double()
            if made.weights.bias is not None:
                added = added + made.weights.bias[group, begin : begin + width].double()
            out[row, begin : begin + width] += added
    return out


def host(rows: GroupedRows) -> HostRows:
    assert rows.host is not None
    return rows.host


def by_reference(x, weights, rows, out, **more):
    low_rank_reference(x, weights, host(rows), out, **more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("function", [low_rank_add, by_reference])
def test_rows_get_the_products_of_their_groups(case, function):
    made = make_inputs(case, "cpu", 3)
    wanted = expected(case, made)
    function(*made)
    torch.testing.assert_close(made.out.double(), wanted, atol=case.tolerance, rtol=case.tolerance)


def test_a_row_has_the_same_bits_beside_any_others():
    case = CASES[2]
    for function in (low_rank_add, by_reference):
        whole, one = make_inputs(case, "cpu", 5), make_inputs(case, "cpu", 5)
        function(*whole, batch_invariant=True)
        rows = grouped_rows(np.array([2]), 3, torch.from_numpy)
        alone = one.out[4:5].clone()
        function(one.x[4:5], one.weights, rows, alone, batch_invariant=True)
        assert torch.equal(alone[0], whole.out[4])


@pytest.mark.parametrize("case", [CASES[3], CASES[4]], ids=lambda case: case.name)
def test_a_group_that_was_cleared_adds_nothing_and_can_be_written_again(case):
    made = make_inputs(case, "cpu", 1)
    made.weights.clear(0)
    made.weights.clear(1)
    before = made.out.clone()
    low_rank_add(*made)
    assert torch.equal(made.out, before)
    assert not made.weights.down.any()
    made.weights.put(1, 0, torch.ones(1, 48), torch.ones(24, 1), None)
    low_rank_add(*made)
    torch.testing.assert_close(made.out[0, :24], before[0, :24] + made.x[0].sum())
    assert torch.equal(made.out[:, 24:], before[:, 24:])


@pytest.mark.skipif(load() is None, reason="there is no compiled code here")
def test_the_binding_refuses_what_would_lead_out_of_memory():
    x, weights, grouped, out = make_inputs(CASES[2], "cpu", 1)
    rows = host(grouped)
    assert takes_native(x, weights, out)
    with pytest.raises(RefusedCall, match="out must be"):
        low_rank_native(x, weights, rows, out[:, :-1])
    with pytest.raises(RefusedCall, match="x must be"):
        low_rank_native(x[:, :-1], weights, rows, out)
    with pytest.raises(RefusedCall, match="group 0 is 5"):
        low_rank_native(x, weights, host(grouped_rows(np.array([5]), 6, torch.from_numpy)), out)
    with pytest.raises(RefusedCall, match="row with a group 0 is 7"):
        low_rank_native(x, weights, host(grouped_rows(np.array([-1] * 7 + [0]), 3, torch.from_numpy)), out)
    weights.ranks[0] = 17
    with pytest.raises(RefusedCall, match="ranks beyond 16"):
        low_rank_native(x, weights, rows, out)
    other = LowRankWeights(2, 16, 70, (40, 7, 33), torch.float32, CPU)
    weights.ranks[0] = 3
    with pytest.raises(RefusedCall, match="layers of different groups"):
        LayerWeights([weights, other])
