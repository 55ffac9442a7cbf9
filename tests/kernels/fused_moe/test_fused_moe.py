"""Routing and experts on a CPU against their definitions."""

import pytest
import torch

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.fused_moe import PackedExperts, Routing, fused_moe, pack_experts, route
from troupellm.kernels.fused_moe.cases import CASES, CLAMPED, DEEPSEEK, DEEPSEEK_V2, Case, Inputs, make_inputs
from troupellm.kernels.fused_moe.experts import clamped_gate
from troupellm.kernels.fused_moe.reference import fused_moe_reference, gated_reference
from troupellm.kernels.fused_moe.sigmoid import batch_invariant_sigmoid


def packed(inputs: Inputs, case: Case) -> PackedExperts:
    return pack_experts(tuple(inputs.gate_up), tuple(inputs.down), case.swiglu, inputs.gate_up_bias, inputs.down_bias)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_experts_sum_equals_the_reference(case: Case) -> None:
    inputs = make_inputs(case, "cpu", 1)
    weights, ids = route(inputs.logits, case.routing)
    before = inputs.x.clone()
    got = fused_moe(inputs.x, weights, ids, packed(inputs, case))
    expected = fused_moe_reference(
        inputs.x,
        weights,
        ids,
        tuple(inputs.gate_up),
        tuple(inputs.down),
        case.swiglu,
        None if inputs.gate_up_bias is None else tuple(inputs.gate_up_bias),
        None if inputs.down_bias is None else tuple(inputs.down_bias),
    )
    assert got.dtype == case.dtype
    torch.testing.assert_close(got, expected, atol=case.tolerance, rtol=case.tolerance)
    assert torch.equal(inputs.x, before)


def test_no_tokens_are_no_work() -> None:
    inputs = make_inputs(CASES[0], "cpu", 1)
    weights, ids = route(inputs.logits[:0], CASES[0].routing)
    assert fused_moe(inputs.x[:0], weights, ids, packed(inputs, CASES[0])).shape == (0, CASES[0].hidden)


@pytest.mark.parametrize("name", ["batch", "clamped_with_biases"])
def test_a_token_alone_is_that_token_in_a_batch(name: str) -> None:
    """To the bit where that is asked for, else as closely as products of other numbers of rows are."""
    case = next(case for case in CASES if case.name == name)
    inputs = make_inputs(case, "cpu", 1)
    weights, ids = route(inputs.logits, case.routing)
    for wanted in (False, True):
        with batch_invariant(wanted):
            experts = packed(inputs, case)
        whole = fused_moe(inputs.x, weights, ids, experts)
        alone = torch.cat(
            [fused_moe(inputs.x[i : i + 1], weights[i : i + 1], ids[i : i + 1], experts) for i in range(8)]
        )
        torch.testing.assert_close(whole[:8], alone, atol=1e-5, rtol=1e-5)
        assert not wanted or torch.equal(whole[:8], alone)


def by_hand(logits: list[float], routing: Routing, bias: list[float] | None = None) -> dict[int, float]:
    """One token's routing in plain Python."""
    values = torch.tensor(logits, dtype=torch.float64)
    scores = {"softmax": values.softmax(0), "sigmoid": values.sigmoid(), "softmax_of_chosen": values}[routing.scoring]
    choice = (scores if bias is None else scores + torch.tensor(bias, dtype=torch.float64)).tolist()
    size = len(logits) // routing.groups
    groups = [choice[begin : begin + size] for begin in range(0, len(logits), size)]
    worth = [max(group) if routing.group_score == "max" else sum(sorted(group)[-2:]) for group in groups]
    best = sorted(range(routing.groups), key=lambda group: -worth[group])[: routing.top_groups]
    allowed = [expert for expert in range(len(logits)) if routing.groups == 1 or expert // size in best]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: routing.top_k]
    weights = scores[chosen]
    if routing.scoring == "softmax_of_chosen":
        weights = weights.softmax(0)
    if routing.renormalize:
        weights = weights / weights.sum()
    return dict(zip(chosen, (weights * routing.scale).tolist(), strict=True))


ROUTINGS = {
    "softmax": Routing(top_k=3),
    "renormalized": Routing(top_k=3, renormalize=True, scale=0.5),
    "of_chosen": Routing(top_k=4, scoring="softmax_of_chosen"),
    "sigmoid": Routing(top_k=2, scoring="sigmoid"),
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK,
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", list(ROUTINGS))
def test_routing_chooses_the_experts_found_by_hand(name: str, biased: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    logits, bias = torch.randn(12, 16, generator=generator), torch.randn(16, generator=generator)
    weights, ids = route(logits, ROUTINGS[name], bias if biased else None)
    for token in range(12):
        expected = by_hand(logits[token].tolist(), ROUTINGS[name], bias.tolist() if biased else None)
        got = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx(expected, abs=1e-5)


def test_the_clamped_gate_keeps_to_its_limits() -> None:
    gate_up = torch.randn(5, 24, generator=torch.Generator().manual_seed(2)) * 8
    expected = gated_reference(gate_up, CLAMPED)
    assert (gate_up.abs() > 7).any()
    torch.testing.assert_close(clamped_gate(gate_up.clone(), CLAMPED), expected)
    gate, up = 9.0, -8.0
    by_limits = 7.0 / (1 + torch.tensor(-1.702 * 7).exp()) * (-7 + 1)
    assert clamped_gate(torch.tensor([[gate, up]]), CLAMPED).item() == pytest.approx(by_limits.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sigmoid_does_not_depend_on_the_place(dtype: torch.dtype) -> None:
    x = torch.randn(1200, generator=torch.Generator().manual_seed(5)).mul_(4).to(dtype)
    together = batch_invariant_sigmoid(x)
    torch.testing.assert_close(together, x.sigmoid())
    assert torch.equal(together, torch.cat([batch_invariant_sigmoid(one) for one in x.split(1)]))
    assert torch.equal(together[3:], batch_invariant_sigmoid(x[3:]))
