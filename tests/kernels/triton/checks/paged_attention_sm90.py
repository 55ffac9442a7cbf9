"""The attention kernels compiled for sm_90 at real shapes, with the tile sizes of the tables."""

from typing import Any

import pytest
import torch

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_offline import SHARED_BYTES, Report, compile_for
from troupellm.kernels.paged_attention.device_plan import AttentionShape, decode_launch, extend_launch
from troupellm.kernels.paged_attention.triton_decode import decode_kernel, merge_kernel
from troupellm.kernels.paged_attention.triton_extend import extend_kernel
from troupellm.kernels.paged_attention.triton_latent import latent_kernel
from troupellm.kernels.paged_attention.triton_plan import decode_tasks_kernel, extend_blocks_kernel

POINTERS = ("block_tables", "query_starts", "query_stops", "context_lens", "tasks", "blocks")
NUMBERS = ("query_stride", "out_stride", "block_stride")
TREE = {"tree_bases": "*i32", "tree_nodes": "*i64", "tree_positions": "*i32"}


TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv"}


def compiled(
    kernel: Any,
    shape: AttentionShape,
    launch: Launch,
    *,
    io: str = "bf16",
    softcap: bool = False,
    sinks: bool = False,
    tree: bool = False,
    more: dict[str, str] | None = None,
    **constants: int,
) -> Report:
    kv = TYPES[shape.kv_dtype]
    arguments = {
        **dict.fromkeys(("query", "out"), f"*{io}"),
        **dict.fromkeys(("keys", "values"), f"*{kv}"),
        **dict.fromkeys(("key_scales", "value_scales", "sinks", "part_sums", "part_stats"), "*fp32"),
        **dict.fromkeys(POINTERS, "*i32"),
        **dict.fromkeys(NUMBERS, "i32"),
        **TREE,
        **(more or {}),
        "table_stride": "i32:1",
        "programs": "i32:1",
        "pre_scale": "fp32",
        "post_scale": "fp32",
    }
    fixed: dict[str, Any] = {
        "ROW": shape.head_dim + (4 if kv == "i8" else 0),
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "DIM": shape.padded_dim,
        "WINDOW": shape.window or 0,
        "PAGE": shape.block_size,
        "SOFT_CAP": softcap,
        **constants,
    }
    fixed |= {} if sinks else {"sinks": None}
    fixed |= {} if tree else dict.fromkeys(TREE)
    fixed |= {} if kv == "i8" else {"key_scales": None, "value_scales": None}
    fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    report = compile_for(kernel, arguments, launch, fixed)
    assert report.spilled_bytes == 0
    assert report.shared_bytes * launch.occupancy <= SHARED_BYTES
    return report


def decode(shape: AttentionShape, *, queries: int = 1, **options: Any) -> Report:
    launch = decode_launch(shape, queries)
    report = compiled(decode_kernel, shape, launch, QUERIES=queries, ROWS=shape.packed(queries), **options)
    assert report.registers <= 65536 // (launch.warps * 32 * launch.occupancy)
    tile_bytes = launch.constants["TILE"] * shape.padded_dim * shape.kv_dtype.itemsize
    assert report.buffers(tile_bytes) >= 4, "keys and values are not loaded ahead"
    assert report.count("mma.sync") + report.count("wgmma.mma_async") > 0
    return report


def extend(shape: AttentionShape, **options: Any) -> Report:
    launch = extend_launch(shape)
    report = compiled(extend_kernel, shape, launch, TOKENS=launch.constants["ROWS"] // shape.group, **options)
    assert report.count("wgmma.mma_async") + report.count("mma.sync") > 0
    return report


def test_decode_of_8_bit_caches() -> None:
    assert decode(AttentionShape(64, 8, 128, 16, kv_dtype=torch.float8_e4m3fn)).count("mma.sync") > 0


def test_attention_of_prompts_uses_matrix_instructions() -> None:
    report = extend(AttentionShape(32, 8, 128, 16))
    assert report.buffers(64 * 128 * 2) >= 4
    assert report.count("wgmma.mma_async") > 0


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 4096])
def test_attention_with_trees_of_drafts_compiles(window: int | None) -> None:
    extend(AttentionShape(32, 8, 128, 16, window), tree=True)


@pytest.mark.parametrize("block_size", [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (32, 64))])
@pytest.mark.parametrize("heads", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_attention_of_single_tokens_compiles(heads: int, block_size: int) -> None:
    decode(AttentionShape(heads, 8, 128, block_size))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256, 512])
def test_attention_with_other_head_dims_compiles(head_dim: int) -> None:
    decode(AttentionShape(32, 8, head_dim, 16))
    extend(AttentionShape(32, 8, head_dim, 16))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("heads", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_attention_over_8_bit_caches_compiles(heads: int, dtype: torch.dtype) -> None:
    decode(AttentionShape(heads, 8, 128, 16, kv_dtype=dtype))
    extend(AttentionShape(heads, 8, 128, 16, kv_dtype=dtype))


@pytest.mark.slow
def test_a_window_a_cap_and_sinks() -> None:
    shape = AttentionShape(64, 8, 64, 16, window=128)
    decode(shape, softcap=True, sinks=True)
    extend(shape, softcap=True, sinks=True)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "queries"), [(32, 4), (32, 5), (64, 5), (64, 8)])
def test_attention_that_verifies_drafts_compiles(heads: int, queries: int) -> None:
    decode(AttentionShape(heads, 8, 128, 16), queries=queries)


@pytest.mark.slow
def test_attention_in_float32_compiles() -> None:
    shape = AttentionShape(16, 8, 128, 16, kv_dtype=torch.float32)
    decode(shape, io="fp32")
    extend(shape, io="fp32")


def test_what_goes_with_decode() -> None:
    shape = AttentionShape(32, 8, 128, 16)
    compiled(merge_kernel, shape, Launch(), HEADS=32, OUT_ROW=128, QUERIES=1, ROWS=16, TILE=64, PIECES=16)
    whole = dict.fromkeys(("rows", "kv_heads", "queries", "window", "programs"), "i32:1")
    pointers = dict.fromkeys((*POINTERS, "tasks", "blocks"), "*i32")
    for kernel, constants in (
        (decode_tasks_kernel, {"TILE": 64, "ROWS": 1024}),
        (extend_blocks_kernel, {"BLOCK": 32, "ROWS": 1024}),
    ):
        assert compile_for(kernel, whole | pointers, Launch(), constants).spilled_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.slow)])
@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_attention_to_latent_vectors_fits_the_registers(heads: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(heads, 1, 576, 16, kv_dtype=dtype, latent=512)
    launch = decode_launch(shape, 1)
    sizes = {"HEADS": heads, "KV_HEADS": shape.task_heads, "LATENT": 512, "LATENT_DIM": 512}
    sizes |= {"ROTATED": 64, "ROTATED_DIM": 64, "ROWS": shape.packed(1)}
    kernel_arguments = {"cache": f"*{TYPES[dtype]}", "scale": "fp32"}
    report = compiled(latent_kernel, shape, launch, more=kernel_arguments, **sizes)
    assert report.registers <= 65536 // (launch.warps * 32 * launch.occupancy)
    compiled(merge_kernel, shape, Launch(), OUT_ROW=576, QUERIES=1, TILE=32, PIECES=16, **sizes | {"DIM": 512})
