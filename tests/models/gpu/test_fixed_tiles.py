"""--batch-invariant on a GPU: products of one shape, which are no more of them than there must be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import linear as linear_kernel
from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.linear import batch_invariant as fixed_tiles, linear, pack
from troupellm.kernels.linear.batch_invariant import in_fixed_tiles
from troupellm.kernels.quantized_linear import Fp8, Int4Group, Int8Channel
from troupellm.kernels.quantized_linear.gpu import GpuProduct
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.gpu.batch import triton_planner
from troupellm.models.gpu.graph_dispatch import GraphKey
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.layers.decoder import Decoder
from troupellm.models.load.to_device import moved
from troupellm.tests.support.engines.inside import warm_up_graph
from troupellm.tests.support.gpu.absent_gpu import PLAIN
from troupellm.tests.support.gpu.faked_gpu import CUDA, AbsentGpu, AbsentWeights, absent_gpu

TILE = fixed_tiles.TILE_ROWS["cuda"]


@pytest.mark.parametrize("rows", [1, 5, TILE - 1, TILE, TILE + 1, 3 * TILE + 7])
def test_a_row_is_what_it_is_alone_and_anywhere(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles as a GPU has them."""
    monkeypatch.setitem(fixed_tiles.TILE_ROWS, "cpu", TILE)
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(size, 192, generator=generator) for size in (72, rows))

    def product(tile: Tensor) -> Tensor:
        assert tile.shape == (TILE, 192)
        return functional.linear(tile, weight)

    whole = in_fixed_tiles(x, product)
    assert whole.shape == (rows, 72)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(in_fixed_tiles(x[row : row + 1], product)[0], whole[row])
    assert torch.equal(in_fixed_tiles(x.flip(0), product).flip(0), whole)
    torch.testing.assert_close(whole, functional.linear(x, weight))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product."""
    found, product = list[int](), linear_kernel._product
    monkeypatch.setattr(linear_kernel, "_product", lambda x, packed: found.append(x.shape[0]) or product(x, packed))
    return found


@pytest.mark.parametrize(("rows", "reads"), [(1, 1), (32, 1), (TILE, 1), (TILE + 1, 2), (2048, 2048 // TILE)])
def test_a_weight_is_read_once_per_fixed_tile(rows: int, reads: int, products: list[int]) -> None:
    with absent_gpu(), batch_invariant():
        x = torch.empty(rows, 256, dtype=torch.bfloat16, device=CUDA)
        out = linear(x, pack(torch.empty(96, 256, dtype=torch.bfloat16, device=CUDA)))
    assert out.shape == (rows, 96)
    assert products == [TILE] * reads


@pytest.mark.parametrize(
    "quantize", [Int8Channel.quantize, Fp8.quantize, lambda weight: Int4Group.quantize(weight, 64)]
)
def test_what_has_tiles_of_its_own_is_not_cut(
    quantize: Callable[[Tensor], Any], products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for any number of rows, in one launch."""
    monkeypatch.setattr("troupellm.kernels.quantized_linear.packed_weights.PackedWeight.base", 0)
    weight, blocks = quantize(torch.randn(96, 256)), set[int]()
    for rows in (1, 40, 200):
        with absent_gpu(answer=False) as launches, batch_invariant():
            packed = pack(moved(weight, CUDA))
            assert isinstance(packed.fast, GpuProduct)
            linear(torch.empty(rows, 256, dtype=torch.bfloat16, device=CUDA), packed)
        found = [launch for launch in launches if "BLOCK_M" in launch.options]
        assert len(found) == 1
        blocks.add(found[0].options["BLOCK_M"])
    assert blocks == {TILE}
    assert products == [1, 40, 200]


def test_a_step_is_filled_up_once_for_all_layers(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    given, cut = list[int](), linear_kernel.in_fixed_tiles
    with absent_gpu():
        with batch_invariant():
            decoder = Decoder(PLAIN, AbsentWeights(), max_model_len=64)
        plan = triton_planner(PLAIN, 8, torch.bfloat16, invariant=True)
        runner = CudaRunner(
            decoder,
            KVCache(PLAIN, 9, 8, torch.bfloat16, CUDA),
            AbsentGpu(),
            max_model_len=64,
            slots=32,
            plan=plan,
            capture_sizes=(32,),
        )
        monkeypatch.setattr(linear_kernel, "in_fixed_tiles", lambda x, run: given.append(x.shape[0]) or cut(x, run))
        warm_up_graph(runner, GraphKey(32))
    in_layers = 4 * PLAIN.num_layers
    assert products == [TILE] * (in_layers + 1)
    assert given == [TILE] * in_layers + [32]  # the head is given those that count
