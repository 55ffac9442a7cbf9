"""Goals that are about kernels alone: attention and drawing."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import attention, functional

from troupellm.load_tests.gpu.gathered import Found
from troupellm.load_tests.kernels.ceilings import Measured
from troupellm.load_tests.kernels.checks import Check
from troupellm.load_tests.kernels.shapes import Shapes, Work
from troupellm.load_tests.kernels.timing import Timing, measure
from troupellm.load_tests.roofline import SIZES

SECONDS = 0.3
KILO = 1024
LARGEST_ERROR = 5e-3
"""Of attention in bfloat16: relative Frobenius norm of the difference from float32."""


def _one(device: torch.device, starts: list[int], counts: list[int]) -> Work:
    shapes = Shapes(SIZES["qwen3-8b"], device, torch.bfloat16, KILO)
    return next(shapes.attention("attention", starts, counts))


def _measured(device: torch.device, starts: list[int], counts: list[int]) -> tuple[Timing, float]:
    """One layer, and its bytes."""
    work = _one(device, starts, counts)
    return measure(work.run, device, SECONDS), work.bytes


def decode_bandwidth(device: torch.device, ceilings: Measured) -> Found:
    """G8."""
    found, details = dict[str, float](), dict[str, Any]()
    for name, rows, context in (("16 x 4k", 16, 4 * KILO), ("64 x 4k", 64, 4 * KILO), ("1 x 32k", 1, 32 * KILO)):
        timing, size = _measured(device, [context - 1] * rows, [1] * rows)
        found[name] = size / timing.median / ceilings.read
        details[name] = {"us": timing.median * 1e6, "GB/s": size / timing.median / 1e9, "runs": timing.runs}
    return found, details


def skewed(device: torch.device, ceilings: Measured) -> Found:
    """G9."""
    lengths = [128 * KILO] + [4 * KILO] * 31
    uneven, size = _measured(device, [length - 1 for length in lengths], [1] * 32)
    even = sum(lengths) // 32
    level, _ = _measured(device, [even - 1] * 32, [1] * 32)
    return {"ratio": uneven.median / level.median}, {
        "us": uneven.median * 1e6,
        "even us": level.median * 1e6,
        "bytes": size,
        "runs": uneven.runs,
    }


def prefill(device: torch.device, ceilings: Measured) -> Found:
    """G10: rates over those of torch's best backend on a fresh prompt of 8k; `paged` is behind as many keys again."""
    tokens, size = 8 * KILO, SIZES["qwen3-8b"]
    best, rates = 0.0, dict[str, Any]()
    query = torch.randn(1, size.heads, tokens, size.head_dim, device=device, dtype=torch.bfloat16)
    key, value = (
        torch.randn(1, size.kv_heads, tokens, size.head_dim, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    flops = 2 * size.heads * size.head_dim * tokens * (tokens + 1)
    for backend in (attention.SDPBackend.FLASH_ATTENTION, attention.SDPBackend.CUDNN_ATTENTION):
        try:
            with attention.sdpa_kernel(backend):
                seconds = measure(lambda _: _sdpa(query, key, value), device, SECONDS).median
        except RuntimeError as error:  # not built in, or not for this shape
            rates[backend.name] = str(error).splitlines()[0][:200]
            continue
        rates[backend.name] = flops / seconds / 1e12
        best = max(best, flops / seconds)
    if not best:
        raise RuntimeError(f"no backend of torch computes this: {rates}")
    found = dict[str, float]()
    for name, start in (("fresh", 0), ("paged", tokens)):
        work = _one(device, [start], [tokens])
        rate = work.flops / measure(work.run, device, SECONDS).median
        found[name], rates[f"{name} TFLOP/s"] = rate / best, rate / 1e12
    return found, rates


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def drawing(device: torch.device, ceilings: Measured) -> Found:
    """G15."""
    shapes, found, details = (
        Shapes(SIZES["qwen3-8b"], device, torch.bfloat16, KILO),
        dict[str, float](),
        dict[str, Any](),
    )
    for batch in (1, 256):
        draw = measure(next(shapes.works("sampling", batch)).run, device, SECONDS).median
        head = measure(list(shapes.works("linear", batch))[-1].run, device, SECONDS).median
        cut = max(measure(work.run, device, SECONDS).median for work in shapes.works("truncated_sampling", batch))
        found[f"plain, batch {batch}"], found[f"top-p, batch {batch}"] = draw / head, cut / head
        details[f"batch {batch}"] = {"draw us": draw * 1e6, "top-p us": cut * 1e6, "head us": head * 1e6}
    return found, details


REAL = {
    "decode_attention": (
        ("decode 8 x 1k", [KILO - 1] * 8, [1] * 8),
        ("ragged decode", [0, 14, 15, 16, 999, 4095], [1] * 6),
    ),
    "prefill_attention": (
        ("fresh prompt", [0], [600]),
        ("chunks behind keys", [512, 100], [300, 65]),
    ),
}
"""Positions and numbers of query tokens, by the operation that computes them."""


@torch.inference_mode()
def real_checks(operation: str, device: torch.device) -> list[Check]:
    """Of attention at a model's shapes, against float32 over gathered keys; other operations have none."""
    size = SIZES["qwen3-8b"]
    return [
        Check(
            operation,
            f"{name}, real shape",
            _error(device, size.heads, size.kv_heads, size.head_dim, starts, counts) / LARGEST_ERROR,
        )
        for name, starts, counts in REAL.get(operation, ())
    ]


def _error(device: torch.device, heads: int, kv_heads: int, dim: int, starts: list[int], counts: list[int]) -> float:
    import numpy as np

    from troupellm.kernels.paged_attention import triton_launch
    from troupellm.kernels.paged_attention.device_plan import AttentionShape, DevicePlan

    lengths, page = [start + count for start, count in zip(starts, counts, strict=True)], 16
    width = -(-max(lengths) // page)
    tables = np.random.default_rng(1).permutation(width * len(lengths)).astype(np.int32).reshape(-1, width)
    caches = torch.randn(2, tables.size, kv_heads, page, dim, device=device, dtype=torch.bfloat16)
    query = torch.randn(sum(counts), heads, dim, device=device, dtype=torch.bfloat16)
    shape = AttentionShape(heads, kv_heads, dim, page)
    plan = DevicePlan.from_host(tables, np.asarray(starts), np.asarray(counts), shape=shape, device=device)
    out = torch.empty_like(query)
    triton_launch.run(query, (caches[0], caches[1]), plan, dim**-0.5, out)
    expected, begin = torch.empty(query.shape, device=device), 0
    for row, (start, count, length) in enumerate(zip(starts, counts, lengths, strict=True)):
        blocks = torch.from_numpy(tables[row].astype(np.int64)).to(device)
        keys, values = caches[:, blocks].float().permute(0, 2, 1, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :length]
        mine = query[begin : begin + count].float().transpose(0, 1)
        seen = torch.arange(length, device=device) <= torch.arange(start, length, device=device)[:, None]
        group = heads // kv_heads
        result = functional.scaled_dot_product_attention(
            mine, keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), attn_mask=seen
        )
        expected[begin : begin + count] = result.transpose(0, 1)
        begin += count
    return float((out.float() - expected).norm() / expected.norm())
