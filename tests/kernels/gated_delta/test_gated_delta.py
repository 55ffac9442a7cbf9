"""The gated delta rule against its definition, and cut in any way."""

import pytest
import torch

from troupellm.kernels.gated_delta import gated_delta
from troupellm.kernels.gated_delta.cases import CASES, Case, make_inputs
from troupellm.kernels.gated_delta.reference import gated_delta_reference
from troupellm.kernels.short_conv.spans import conv_spans


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_and_states_equal_the_reference(case: Case, corrects: bool) -> None:
    *inputs, beta, state, spans = make_inputs(case, "cpu", 1)
    expected_state, beta = state.clone(), beta if corrects else None
    expected = gated_delta_reference(*inputs, beta, expected_state, spans)
    got = gated_delta(*inputs, beta, state, spans)
    torch.testing.assert_close(got, expected, atol=case.tolerance, rtol=case.tolerance)
    torch.testing.assert_close(state, expected_state, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("cuts", [(1,) * 100, (7, 64, 29), (1, 98, 1)])
def test_every_cut_of_a_row_gives_the_same(cuts: tuple[int, ...]) -> None:
    *inputs, state, _ = make_inputs(Case("", (100,), 2, 4, 16, 16), "cpu", 3)
    again, slot = state[:1].clone(), torch.tensor([0])
    whole = gated_delta(*inputs, state, conv_spans(slot, torch.tensor([100]), 2))
    parts = zip(*(part.split(list(cuts)) for part in inputs), strict=True)
    pieces = [gated_delta(*part, again, conv_spans(slot, torch.tensor([len(part[0])]), 2)) for part in parts]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(again[0], state[0], atol=1e-5, rtol=1e-4)


def test_strong_decay_forgets_without_overflow() -> None:
    query, key, value, _, beta, state, spans = make_inputs(CASES[3], "cpu", 4)
    decay = torch.full((query.shape[0], CASES[3].value_heads), -40.0)
    kept = state.clone()
    expected = gated_delta_reference(query, key, value, decay, beta, kept, spans)
    got = gated_delta(query, key, value, decay, beta, state, spans)
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["decodes", "ragged", "groups", "large_states"])
def test_a_row_with_one_token_says_the_same_alone(name: str) -> None:
    *inputs, state, spans = make_inputs(next(case for case in CASES if case.name == name), "cpu", 5)
    kept = state.clone()
    together = gated_delta(*inputs, state, spans)
    for begin, slot, count in zip(spans.begins.tolist(), spans.slots.tolist(), spans.counts.tolist(), strict=True):
        if count == 1:
            own = [part[begin : begin + 1] for part in inputs]
            alone = gated_delta(*own, kept, conv_spans(torch.tensor([slot]), torch.tensor([1]), 2))
            assert torch.equal(alone[0], together[begin])
            assert torch.equal(kept[slot], state[slot])
