"""Grouped products, compiled for sm_90 at the shapes of adapters of rank 16 for Qwen3-8B."""

import pytest

from troupellm.kernels.common.triton_offline import SHARED_BYTES, compile_for
from troupellm.kernels.grouped_linear.triton_grouped import grouped_kernel, grouped_launch


@pytest.mark.parametrize(("depth", "width"), [(4096, 16), (16, 4096), (4096, 4096)])
def test_grouped_products_of_each_shape_compile_without_spills(depth: int, width: int) -> None:
    arguments = {
        **dict.fromkeys(("x", "weights", "out"), "*bf16"), **dict.fromkeys(("rows", "starts"), "*i32"),
        "scales": "*fp32", "groups": "i32:1",
        **dict.fromkeys(("width", "in_features", "x_stride", "out_stride"), "i32"),
    }  # fmt: skip
    launch = grouped_launch(depth, width)
    report = compile_for(grouped_kernel, arguments, launch, {"BLOCK_G": 64})
    assert report.spilled_bytes == 0
    assert report.shared_bytes <= SHARED_BYTES
    assert report.count("mma.sync") > 0
