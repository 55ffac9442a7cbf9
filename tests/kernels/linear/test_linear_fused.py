"""Products with a norm before them and a sum or a gate behind them: every path gives what the parts give one by one."""

import shutil
import subprocess
from itertools import product

import pytest
import torch
from torch.nn import functional

from troupellm.kernels import linear as linear_kernel
from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.linear import PackedLinear, cpu, gated_linear, linear, linear_add, norm_linear, pack

SHAPES = ((96, 64), (288, 768), (224, 33), (17, 40), (1024, 96))
ROWS = (1, 2, 5, 6, 7, 13, 16, 17, 40, 64, 65, 90, 513)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.fixture(params=["torch", pytest.param("compiled", marks=needs_compiler)])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(linear_kernel, "cpp_weight", lambda *given, **named: None)
    return request.param


def weights(shape: tuple[int, int], *, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None, PackedLinear]:
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    added = torch.randn(shape[0], generator=generator) if bias else None
    return weight, added, pack(weight, added)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_forms_at_all_sizes(shape: tuple[int, int], path: str) -> None:
    weight, bias, packed = weights(shape, bias=shape[0] % 32 == 0)
    assert (packed.native is not None) == (path == "compiled")
    norm = torch.rand(shape[1]) + 0.5
    for rows in ROWS:
        wide = torch.randn(rows, shape[1] + 3)
        x = wide[:, : shape[1]]
        residual = torch.randn(rows, shape[0])
        plain = functional.linear(x, weight, bias)
        normed = functional.linear(functional.rms_norm(x, (shape[1],), norm, 1e-6), weight, bias)
        summed = residual.clone()
        linear_add(x, packed, summed, 0.5)
        near = {"atol": 2e-5, "rtol": 2e-5}
        torch.testing.assert_close(linear(x, packed), plain, **near)
        torch.testing.assert_close(norm_linear(x, norm, 1e-6, packed), normed, **near)
        torch.testing.assert_close(summed, residual + 0.5 * plain, **near)
        if shape[0] % 2 == 0:
            gate, up = normed.chunk(2, dim=-1)
            expected = functional.gelu(gate, approximate="tanh") * up
            torch.testing.assert_close(gated_linear(x, packed, "gelu_tanh", norm, 1e-6), expected, **near)
            gate, up = plain.chunk(2, dim=-1)
            torch.testing.assert_close(gated_linear(x, packed, "silu"), functional.silu(gate) * up, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype, path: str) -> None:
    """To the bit: alone, in crowds of every size, at every place."""
    weight = torch.randn(160, 100) / 10
    with batch_invariant():
        packed = pack(weight.to(dtype), torch.randn(160).to(dtype))
    assert packed.invariant
    x = torch.randn(90, 100).to(dtype)
    alone = torch.cat([linear(row[None], packed) for row in x])
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], packed), alone[:rows])
        assert torch.equal(linear(x[-rows:], packed), alone[-rows:])


@needs_compiler
def test_neither_the_number_of_threads_matters_nor_that_of_rows() -> None:
    """Of weights with a share for each thread, with more of whole panels, the last one in part, and with empty ones."""
    before = torch.get_num_threads()
    for out, depth, rows in product((100, 560, 1000), (200, 2048), (1, 14, 70)):
        weight, x = torch.randn(out, depth), torch.randn(rows, depth)
        with batch_invariant():
            compiled = pack(weight).native
        assert compiled is not None
        try:
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(compiled.linear(x, None, 0.0, None, 1.0))
                assert torch.equal(compiled.linear(x[-1:], None, 0.0, None, 1.0), found[-1][-1:])
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        torch.testing.assert_close(found[0], functional.linear(x, weight), atol=1e-3, rtol=1e-3)


@needs_compiler
def test_a_lone_row_is_gated_as_among_others() -> None:
    for out, depth in ((2048, 96), (1120, 2048), (160, 64)):
        compiled, x = pack(torch.randn(out, depth)).native, torch.randn(9, depth)
        assert compiled is not None
        found = compiled.gated(x, None, 0.0, "silu")
        for row in range(9):
            assert torch.equal(compiled.gated(x[row : row + 1], None, 0.0, "silu"), found[row : row + 1])


@needs_compiler
def test_many_rows_are_as_exact_as_in_float32() -> None:
    """Split or not: what is left out is little beside what float32 sums round away, at all sizes."""
    shapes = ((1000, 2048), (96, 64), (224, 33), (17, 40))
    for (out, depth), rows in product(shapes, (17, 32, 33, 65, 200, 257, 300, 1030)):
        weight, x, bias = torch.randn(out, depth), torch.randn(rows, depth + 3)[:, :depth], torch.randn(out)
        packed = pack(weight, bias)
        exact = x.double() @ weight.double().T + bias.double()
        size = x.abs().double() @ weight.abs().double().T + bias.abs()
        assert ((linear(x, packed) - exact).abs() / size).max() < 2**-20
        residual = torch.randn(rows, out)
        summed = residual.clone()
        linear_add(x, packed, summed, 0.5)
        assert ((summed - 0.5 * exact - residual).abs() / (size + residual.abs())).max() < 2**-20


@needs_compiler
@pytest.mark.parametrize("out", [64, 640])  # of one panel, for which threads have rows of their own; and of several
def test_many_rows_behind_a_norm_and_through_a_gate_are_what_each_is_alone(
    out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, where they are not split."""
    with batch_invariant():
        compiled = pack(torch.randn(out, 100)).native
    x, norm = torch.randn(200, 100), torch.rand(100)
    assert compiled is not None
    compiled.most_rows = 200
    before = torch.randn(200, out)
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        plain, gated = compiled.linear(x, norm, 1e-5, None, 1.0), compiled.gated(x, norm, 1e-5, "silu")
        added = compiled.linear(x, None, 0.0, before.clone(), 0.5)
        for row in range(0, 200, 7):
            one = slice(row, row + 1)
            assert torch.equal(plain[one], compiled.linear(x[one], norm, 1e-5, None, 1.0))
            assert torch.equal(gated[one], compiled.gated(x[one], norm, 1e-5, "silu"))
            assert torch.equal(added[one], compiled.linear(x[one], None, 0.0, before[one].clone(), 0.5))


@needs_compiler
def test_many_rows_do_not_depend_on_each_other_nor_on_threads() -> None:
    """From the number on from which they are split, where they are."""
    before = torch.get_num_threads()
    for out, depth in ((1000, 2048), (160, 100)):
        compiled, x = pack(torch.randn(out, depth)).native, torch.randn(300, depth)
        assert compiled is not None
        if compiled.most_rows < 300:
            pytest.skip("the processor has neither tiles nor AVX-512")
        found = compiled.linear(x, None, 0.0, None, 1.0)
        x[0] = float("nan")
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                assert torch.equal(compiled.linear(x, None, 0.0, None, 1.0)[1:], found[1:])
        finally:
            torch.set_num_threads(before)
        for begin, end in ((1, 33), (200, 300), (77, 94)):
            assert torch.equal(compiled.linear(x[begin:end], None, 0.0, None, 1.0), found[begin:end])


def test_more_rows_are_taken_where_panels_are_small_or_weights_split() -> None:
    small, large = cpu.Layout(64, 2048), cpu.Layout(64, 4096)

    def rows(layout: cpu.Layout, split_rows: int, *, splits: bool) -> int:
        return cpu.most_rows(layout, cpu.Functions(print, print, 512, split_rows), splits)

    assert (rows(small, 0, splits=True), rows(large, 0, splits=True)) == (512, cpu.FEW_ROWS)
    assert (rows(small, 999, splits=False), rows(large, 999, splits=False)) == (512, cpu.FEW_ROWS)
    assert (rows(small, 999, splits=True), rows(large, 999, splits=True)) == (999, 999)


@needs_compiler
def test_the_compiled_code_says_how_many() -> None:
    command = ["g++", "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    functions = cpu.load()
    assert functions is not None
    many = "__AVX512F__" in known and "__AMX_TILE__" not in known
    assert functions.many_rows == (cpu.MANY_ROWS if many else cpu.FEW_ROWS)


@needs_compiler
def test_an_unknown_layout_leaves_the_product_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_layouts", {})
    monkeypatch.setattr(cpu, "PANELS", (7,))
    weight = torch.randn(96, 64)
    packed = pack(weight)
    assert packed.onednn
    assert packed.native is None
    x = torch.randn(3, 64)
    torch.testing.assert_close(linear(x, packed), functional.linear(x, weight), atol=1e-4, rtol=1e-4)


@needs_compiler
def test_wrong_code_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.cpp.Library, "function", lambda self, name, arguments: lambda *given: None)
    assert cpu.load.__wrapped__() is None


def test_a_nan_stays_in_its_row(path: str) -> None:
    _, _, packed = weights((96, 64), bias=False)
    x = torch.randn(9, 64)
    clean = linear(x, packed)
    x[4, 7] = float("nan")
    got = linear(x, packed)
    assert got[4].isnan().all()
    assert torch.equal(got[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


@needs_compiler
@pytest.mark.parametrize("panels", [cpu.PANELS, cpu.PANELS[::-1]], ids=["widest first", "narrowest first"])
def test_a_weight_of_one_number_tells_nothing_of_others_of_its_shape(
    panels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in every layout alike; blocks that begin as nothing have such weights."""
    monkeypatch.setattr(cpu, "PANELS", panels)
    monkeypatch.setattr(cpu, "_layouts", {})
    generator = torch.Generator().manual_seed(6)
    x, weight = torch.randn(3, 64, generator=generator), torch.randn(192, 64, generator=generator)
    assert not linear(x, pack(torch.zeros(192, 64))).any()
    for _ in range(2):
        torch.testing.assert_close(linear(x, pack(weight)), functional.linear(x, weight), atol=1e-4, rtol=1e-4)
