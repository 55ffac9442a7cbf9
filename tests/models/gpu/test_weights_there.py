"""Quantized weights on a GPU: all operations on them run there, with tables that lie there."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from troupellm.kernels.fused_moe import pack_experts
from troupellm.kernels.fused_moe.stacked import stack
from troupellm.kernels.linear import linear, pack
from troupellm.kernels.quantized_linear import Fp8, GgufBlocks, GgufMixture, Int4Group, Mx, QuantizedWeight, merge
from troupellm.kernels.quantized_linear.gguf import LAYOUTS
from troupellm.kernels.quantized_linear.packed_weights import PackedWeight
from troupellm.models.load.to_device import moved
from troupellm.tests.support.gpu.faked_gpu import CUDA, absent_gpu
from troupellm.tests.support.quantized.quantized_weights import COLUMNS, ROWS, gguf, kinds

pytest.importorskip("triton")
CODES, EXPONENTS = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8), torch.ones(ROWS, COLUMNS // 32, dtype=torch.uint8)
ALL: dict[str, QuantizedWeight] = {
    **kinds(),
    "fp6_e2m3": Mx(CODES, EXPONENTS, "fp6_e2m3"),
    "fp8_e4m3": Mx(CODES, EXPONENTS, "fp8_e4m3"),
    "fp8_e5m2": Mx(CODES, EXPONENTS, "fp8_e5m2"),
    "fp8_e5m2_values": Fp8(torch.zeros(ROWS, COLUMNS).to(torch.float8_e5m2), torch.ones(ROWS)),
}


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of four bits lie on the host, which is not asked here either."""
    monkeypatch.setattr(PackedWeight, "base", 0)


def there(*tensors: Tensor) -> bool:
    return all(tensor.device == CUDA for tensor in tensors)


@pytest.mark.parametrize("name", ALL)
def test_each_kind_of_weight_can_be_cut_joined_and_dequantized_on_a_device(name: str) -> None:
    with absent_gpu():
        weight = moved(ALL[name], CUDA)
        assert isinstance(weight, QuantizedWeight)
        parts: Sequence[QuantizedWeight] = (
            weight,
            weight.rows(slice(3, 7)),
            weight.rows(torch.zeros(5, dtype=torch.int64, device=CUDA)),
        )
        joined = merge([weight, weight])
        assert isinstance(joined, QuantizedWeight)
        for part in (*parts, joined):
            assert there(*part.tensors(), part.dequantize(), part.dequantize(torch.bfloat16))
        assert joined.dequantize().shape == (2 * ROWS, COLUMNS)
        x = torch.zeros(3, COLUMNS, dtype=torch.bfloat16, device=CUDA)
        assert there(weight.product(x, torch.zeros(ROWS, dtype=torch.bfloat16, device=CUDA)))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("counting")
def test_a_product_keeps_its_weight_on_the_device(name: str) -> None:
    with absent_gpu(answer=False) as launches:
        bias = torch.zeros(ROWS, dtype=torch.bfloat16, device=CUDA)
        packed = pack(moved(ALL[name], CUDA), bias)
        assert there(packed.weight)
        assert (packed.fast is None) == ("e5m2" in name or name in ("mxfp4", "nvfp4"))
        x = torch.zeros(20, COLUMNS, dtype=torch.float32 if packed.fast is None else torch.bfloat16, device=CUDA)
        assert there(linear(x, packed) if packed.fast is not None else packed.weight)
    assert bool(launches) == (packed.fast is not None)
    assert all(there(part) for launch in launches for part in launch.arguments if isinstance(part, Tensor))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("counting")
def test_blocks_of_gguf_files(layout: str) -> None:
    """Tables of values that do not count up have no product there: such weights are dequantized, there too."""
    block = LAYOUTS[layout]
    blocks = GgufBlocks(torch.zeros(ROWS, COLUMNS // block.weights * block.size, dtype=torch.uint8), layout)
    with absent_gpu(answer=False):
        weight = moved(blocks, CUDA)
        assert isinstance(weight, GgufBlocks)
        assert there(*weight.tensors(), weight.dequantize(torch.bfloat16))
        packed = pack(weight)
        assert (packed.fast is None) == layout.startswith(("IQ", "MX"))
        x = torch.zeros(2, COLUMNS, dtype=torch.float32 if packed.fast is None else torch.bfloat16, device=CUDA)
        assert there(linear(x, packed) if packed.fast is not None else packed.weight)
        assert there(stack([weight, weight]).values)


@pytest.mark.usefixtures("counting")
def test_mixtures_and_groups_in_any_order() -> None:
    parts = [gguf("Q4_K", 144, (0, 2)), gguf("Q6_K", 210, (208,))]
    grouped = Int4Group(
        torch.zeros(ROWS, COLUMNS // 2, dtype=torch.uint8), torch.ones(ROWS, 4), group=torch.arange(COLUMNS) % 4
    )
    with absent_gpu(answer=False) as launches:
        mixture = merge([moved(part, CUDA) for part in parts])
        assert isinstance(mixture, GgufMixture)
        assert there(mixture.dequantize(), moved(grouped, CUDA).dequantize(torch.bfloat16))
        x = torch.zeros(2, COLUMNS, dtype=torch.bfloat16, device=CUDA)
        assert there(linear(x, pack(mixture, torch.zeros(2 * ROWS, device=CUDA))))
    assert launches


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "mxfp6"])
def test_experts_keep_their_weights_on_the_device(name: str) -> None:
    with absent_gpu(answer=False):
        weight = moved(ALL[name], CUDA)
        halves = [merge([weight, weight])] * 2
        packed = pack_experts(halves, [weight] * 2)
        assert packed.stacked is not None
        assert there(packed.stacked.gate_up.values, packed.stacked.down.values)
