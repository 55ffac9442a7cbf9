"""Compiled code reads and writes float32, for every default dtype of the host."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional

from troupellm.kernels.linear import cpu as products, gated_linear, linear, linear_add, norm_linear, pack
from troupellm.kernels.paged_attention import cpu as attention
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.quantized_linear import Int4Group, Int8Channel, QuantizedWeight, cpu_int8, cpu_packed
from troupellm.kernels.rope_kv_write.kv_write import kv_rows
from troupellm.kernels.sampling import cpu as sampling, draw
from troupellm.kernels.sampling.adjust import keep_bits, unpacked
from troupellm.kernels.sampling.cpu import Columns
from troupellm.kernels.sampling.noise import log_exponential, position_keys, token_codes
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code

CPU = torch.device("cpu")
BINDINGS = {
    "products": products.load,
    "attention": attention.load,
    "int8 inputs": cpu_int8.row_quantizer,
    "int8 products": cpu_int8.compiled,
    "products with codes": cpu_packed.load,
    "sampling": sampling.compiled,
}


@pytest.fixture(autouse=True, params=[torch.bfloat16, torch.float64], ids=str)
def _default_type(request: pytest.FixtureRequest) -> Iterator[None]:
    needs_compiled_code()
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


@pytest.mark.parametrize("name", BINDINGS)
def test_what_is_compiled_agrees_with_its_reference(name: str) -> None:
    assert BINDINGS[name].__wrapped__() is not None


@pytest.mark.parametrize("kind", [None, Int8Channel.quantize, lambda weight: Int4Group.quantize(weight, 32)])
def test_products_do_not_depend_on_the_default_dtype(kind: Callable[[torch.Tensor], QuantizedWeight] | None) -> None:
    plain, norm, bias = normal(96, 64), normal(64, seed=2).abs(), normal(96, seed=3)
    weight = plain if kind is None else kind(plain)
    packed, tolerance = pack(weight, bias), 0.02 if isinstance(weight, Int8Channel) else 1e-3
    for rows in (1, 7, 40):
        x = normal(rows, 64, seed=rows)
        normed = functional.rms_norm(x, (64,), norm, 1e-5)
        product, behind = (
            functional.linear(each, plain, bias) if kind is None else weight.product(each, bias) for each in (x, normed)
        )
        gate, up = behind.chunk(2, dim=-1)
        total = torch.ones_like(product)
        linear_add(x, packed, total, 0.5)
        for got, expected in (
            (linear(x, packed), product),
            (norm_linear(x, norm, 1e-5, packed), behind),
            (gated_linear(x, packed, "silu", norm, 1e-5), functional.silu(gate) * up),
            (total, 1 + 0.5 * product),
        ):
            most = tolerance * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(got, expected, atol=most, rtol=0.0)


def test_attention_does_not_depend_on_the_default_dtype() -> None:
    function = attention.load()
    assert function is not None
    starts, counts, size = np.array([19, 6, 0]), np.array([1, 2, 20]), 32
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(4)).view(3, 4).int()
    plan = AttentionPlan(tables.numpy(), starts, counts, block_size=8, num_kv_heads=2, by_token=True)
    caches, projected = normal(2, 12, 2, 8, size), normal(25, 10 * size)
    at = plan.items[:, 3].long() - 1
    rows = kv_rows(tables[plan.items[:, 1].long(), at // 8].long() * 8 + at % 8, 2, 8)
    layer = attention.CppAttention(function, 6, 2, size, 0.2)
    got = layer.write_and_attend(projected, (caches[0], caches[1]), plan, rows, None)
    query, key, value = projected[:23].view(23, 10, size).split((6, 2, 2), dim=1)
    for cache, new in zip(caches, (key, value), strict=True):
        assert torch.equal(cache.view(-1, size)[rows], new.reshape(-1, size))
    expected = paged_attention_reference(query, caches[0], caches[1], tables, plan.items, scale=0.2)
    torch.testing.assert_close(got[:23].view(expected.shape), expected, atol=1e-4, rtol=1e-4)
    assert not got[23:].any()


def test_sampling_does_not_depend_on_the_default_dtype() -> None:
    functions, rows, vocab = sampling.compiled(), 200, 77
    assert functions is not None
    logits, everyone = 3 * normal(rows, vocab), torch.arange(rows)
    bits = torch.randint(-(2**31), 2**31, (rows, 3), generator=torch.Generator().manual_seed(5)).int()
    masked = logits.masked_fill(~unpacked(bits, vocab), -torch.inf)
    codes, keys, scales = token_codes(vocab, CPU), position_keys(everyone * 7, everyone), normal(rows).abs() + 0.1
    scores = (masked - masked.amax(-1, keepdim=True)) * scales[:, None]
    drawn = (scores - log_exponential(codes, keys)).argmax(-1)
    columns = Columns((everyone * 7).numpy(), scales.numpy(), np.full(rows, -np.inf, np.float32))
    found = functions.choose(logits, columns, everyone.numpy(), everyone.numpy(), codes, everyone, bits)
    torch.testing.assert_close(found, (drawn, logits.amax(-1)), atol=0.0, rtol=0.0)
    assert torch.equal(draw(scores, keys, codes), drawn)
    keep_bits(logits, everyone, bits)
    assert torch.equal(logits, masked)
