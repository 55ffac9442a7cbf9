"""Operations that a GPU computes in one launch: what they are on a CPU is what their parts give."""

import pytest
import torch
from torch.nn import functional

from troupellm.kernels.act_quant import cases as code_cases, quantize_activation
from troupellm.kernels.gated_act.gelu import gelu_mul, gelu_mul_quantized
from troupellm.kernels.gated_act.silu import silu_mul, silu_mul_quantized
from troupellm.kernels.grouped_linear import cases as grouped_cases, grouped_linear
from troupellm.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized
from troupellm.kernels.rope_kv_write import cases as rope_cases, rope_kv_write
from troupellm.kernels.rope_kv_write.reference import rope_kv_write_reference
from troupellm.kernels.sampling import reference
from troupellm.kernels.sampling.adjust import keep_bits, penalize, unpacked
from troupellm.kernels.sampling.logprobs import chosen_logprobs, token_logprobs
from troupellm.protocol.messages.worker import SamplingState


@pytest.mark.parametrize("case", rope_cases.CASES, ids=lambda case: case.name)
def test_rope_and_write(case):
    qkv, caches, rows, norms, angles = rope_cases.make_inputs(case, "cpu", 1)
    expected_caches = (caches[0].clone(), caches[1].clone())
    options = {"norms": norms, "angles": angles, "interleaved": case.interleaved}
    expected = rope_kv_write_reference(qkv, case.heads, expected_caches, rows, **options)
    got = rope_kv_write(qkv, case.heads, caches, rows, **options)
    torch.testing.assert_close(got, expected, atol=case.tolerance, rtol=case.tolerance)
    for cache, wanted in zip(caches, expected_caches, strict=True):
        moved = (cache.view(torch.uint8).int() - wanted.view(torch.uint8).int()) % 256
        assert float((moved != 0).float().mean()) < 0.02  # a last bit, or a number between two codes


def test_rows_in_eight_bits_stay_near():
    for case in code_cases.CASES:
        x = code_cases.make_inputs(case, "cpu", 2)
        values, scale = quantize_activation(x, case.codes)
        step = 1 / 127 if case.codes == torch.int8 else 2**-3
        error = (values.float() * scale[:, None] - x.float()).abs()
        assert bool((error <= step * x.float().abs().amax(1, keepdim=True)).all())
        assert float(values.float().abs().max()) == (127 if case.codes == torch.int8 else 448)


def test_norms_and_gates_in_eight_bits():
    generator = torch.Generator().manual_seed(3)
    x, residual = torch.randn(3, 24, generator=generator), torch.randn(3, 24, generator=generator)
    weight, gate_up = torch.rand(24, generator=generator), torch.randn(3, 48, generator=generator)
    other = residual.clone()
    pairs = [
        (rms_norm_quantized(x, weight, 1e-6, torch.int8), rms_norm(x, weight, 1e-6)),
        (rms_norm_quantized(x, weight, 1e-6, torch.int8, residual=residual), add_rms_norm(x, other, weight, 1e-6)),
        (silu_mul_quantized(gate_up, torch.int8), silu_mul(gate_up)),
        (gelu_mul_quantized(gate_up, torch.int8), gelu_mul(gate_up)),
    ]
    for (values, scale), plain in pairs:
        expected, expected_scale = quantize_activation(plain, torch.int8)
        assert torch.equal(values, expected)
        assert torch.equal(scale, expected_scale)
    assert torch.equal(residual, other)


def test_an_offset_is_part_of_the_weight():
    x, weight = torch.randn(2, 16), torch.rand(16)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, offset=1.0), rms_norm(x, weight + 1.0, 1e-6))


@pytest.mark.parametrize("case", grouped_cases.CASES, ids=lambda case: case.name)
def test_grouped_products(case):
    x, weights, rows, starts, out, scales = grouped_cases.make_inputs(case, "cpu", 4)
    expected = out.float().clone()
    for place, row in enumerate(rows.tolist()):
        group = next(g for g, end in enumerate(starts[1:].tolist()) if place < end)
        factor = 1.0 if scales is None else float(scales[group])
        expected[row] += factor * functional.linear(x[row].float(), weights[group].float())
    grouped_linear(x, weights, rows, starts, out, scales=scales)
    torch.testing.assert_close(out.float(), expected, atol=case.tolerance, rtol=case.tolerance)


def test_a_mask_of_bits():
    allowed = torch.rand(2, 70, generator=torch.Generator().manual_seed(5)) < 0.5
    padded = functional.pad(allowed, (0, 26)).view(2, 3, 32).long()
    words = (padded << torch.arange(32)).sum(-1)
    bits = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    assert torch.equal(unpacked(bits, 70), allowed)
    logits = torch.zeros(4, 70)
    keep_bits(logits, torch.tensor([0, 2]), bits)
    assert torch.equal(logits[[0, 2]] == 0, allowed)
    assert bool((logits[[1, 3]] == 0).all())


def test_penalties_are_those_of_the_definition():
    vocab, prompt, generated = 40, [1, 5, 5], [5, 7, 7, 7, 9]
    state = SamplingState(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2)
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(6))
    wanted = reference.distribution(logits[0], state, prompt + generated, len(prompt))
    seen = torch.tensor([[sum(1 << token for token in set(prompt)), 0]], dtype=torch.int32)
    counts = torch.bincount(torch.tensor(generated), minlength=vocab).to(torch.int32)[None]
    penalize(logits, torch.tensor([0]), counts, seen, *(torch.tensor([value]) for value in (1.4, 0.3, 0.2)))
    torch.testing.assert_close(logits[0].double().softmax(-1), wanted, atol=1e-6, rtol=1e-5)


def test_log_probabilities_of_chosen_tokens():
    logits, chosen = torch.randn(3, 50, generator=torch.Generator().manual_seed(7)), torch.tensor([4, 0, 49])
    values, ranks = chosen_logprobs(logits, chosen)
    _, expected, expected_ranks = token_logprobs(logits.log_softmax(-1), chosen, 0)
    torch.testing.assert_close(values, expected[:, 0])
    assert torch.equal(ranks, expected_ranks)
