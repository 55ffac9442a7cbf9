"""The device's best rates, measured in the run whose other numbers are divided by them."""

import time
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor

from troupellm.load_tests.kernels.timing import measure
from troupellm.load_tests.roofline import Ceilings

CPU_BYTES, CUDA_BYTES = 512 * 2**20, 8 * 2**30
CPU_SIDE, CUDA_SIDE = 1536, 8192
EMPTY_KERNELS = 364
"""Launches in a decoding step of an 8B model: 36 layers of ten, and four."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and operations per second; 0 is not measured."""

    device: str
    read: float
    copy: float
    gemm_float32: float = 0.0
    """On a CPU of the better of torch's product and the packed one."""
    gemm_bfloat16: float = 0.0
    gemm_int8: float = 0.0
    gemm_fp8: float = 0.0
    empty_kernel: float = 0.0
    """Seconds per launch of a kernel that does nothing, in a graph."""
    to_device: float = 0.0
    to_host: float = 0.0
    failed: dict[str, str] = {}
    """Measurements that failed, and the reasons."""

    def flops(self, dtype: str) -> float:
        """The ceiling of products in a type; an unmeasured one counts as the widest that was."""
        known = {"float32": self.gemm_float32, "bfloat16": self.gemm_bfloat16, "int8": self.gemm_int8}
        found = {**known, "fp8": self.gemm_fp8}.get(dtype, 0.0)
        return found or self.gemm_bfloat16 or self.gemm_float32

    def roof(self, dtype: str, block: str | None = None) -> Ceilings:
        """For a model whose head is computed in `dtype` and whose layers in `block`."""
        return Ceilings(bandwidth=self.read, head_flops=self.flops(dtype), block_flops=self.flops(block or dtype))


def measure_ceilings(device: torch.device, seconds: float = 0.3) -> Measured:
    """Random data everywhere: zeros take less power and are computed faster."""
    if device.type == "cuda":
        return _measure_cuda(device, seconds)
    source = torch.randn(CPU_BYTES // 4)
    target = torch.empty_like(source)
    return Measured(
        device=f"cpu, {torch.get_num_threads()} threads",
        read=CPU_BYTES / measure(lambda _: source.sum(), device, seconds).least,
        copy=2 * CPU_BYTES / measure(lambda _: target.copy_(source), device, seconds).least,
        gemm_float32=max(float32_rates(device, seconds).values()),
        gemm_int8=_int8_rate(device, seconds),
    )


def float32_rates(device: torch.device, seconds: float) -> dict[str, float]:
    """Of torch's product and of the packed one; on some processors either is far from what the other reaches."""
    from troupellm.kernels.linear import linear, pack

    left, right = torch.randn(CPU_SIDE, CPU_SIDE), torch.randn(CPU_SIDE, CPU_SIDE)
    packed = pack(right)
    products: dict[str, Callable[[int], Tensor]] = {
        "torch.mm": lambda _: torch.mm(left, right),
        "packed": lambda _: linear(left, packed),
    }
    return {name: 2 * CPU_SIDE**3 / measure(run, device, seconds).least for name, run in products.items()}


def _int8_rate(device: torch.device, seconds: float) -> float:
    """Of products with weights in eight bits, inputs quantized on the way."""
    from troupellm.kernels.linear import linear, pack
    from troupellm.kernels.quantized_linear import Int8Channel

    packed = pack(Int8Channel.quantize(torch.randn(CPU_SIDE, CPU_SIDE)))
    x = torch.randn(CPU_SIDE, CPU_SIDE)
    return 2 * CPU_SIDE**3 / measure(lambda _: linear(x, packed), device, seconds).least


def _bandwidths(device: torch.device, seconds: float) -> tuple[float, float]:
    """Of reading alone, by the best of torch's reductions, and of copying; bytes per second."""
    size = min(CUDA_BYTES, torch.cuda.mem_get_info(device)[0] // 4) // 8 * 8
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    reductions: list[Callable[[int], Tensor]] = [
        lambda _: source.sum(),
        lambda _: source.amax(),
        lambda _: torch.linalg.vector_norm(source),
    ]
    read = max(size / measure(reduction, device, seconds).least for reduction in reductions)
    return read, 2 * size / measure(lambda _: target.copy_(source), device, seconds).least


def _measure_cuda(device: torch.device, seconds: float) -> Measured:
    read, copy = _bandwidths(device, seconds)
    left, right = (torch.randn(CUDA_SIDE, CUDA_SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    operations = 2 * CUDA_SIDE**3
    product = operations / measure(lambda _: torch.mm(left, right, out=out), device, seconds).least
    more, failed = measured_one_by_one(
        {
            "gemm_fp8": lambda: _fp8_rate(left, right, operations, device, seconds),
            "empty_kernel": lambda: empty_kernel_seconds(device, seconds),
            "to_device": lambda: _transfer(device, seconds, up=True),
            "to_host": lambda: _transfer(device, seconds, up=False),
        }
    )
    name = torch.cuda.get_device_name(device)
    return Measured(device=name, read=read, copy=copy, gemm_bfloat16=product, failed=failed, **more)


def measured_one_by_one(ceilings: Mapping[str, Callable[[], float]]) -> tuple[dict[str, float], dict[str, str]]:
    """The ceilings of few numbers: the failure of one is reported and does not affect the others."""
    found, failed = dict[str, float](), dict[str, str]()
    for name, measured in ceilings.items():
        try:
            found[name] = measured()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    return found, failed


def _fp8_rate(left: Tensor, right: Tensor, operations: float, device: torch.device, seconds: float) -> float:
    """0 where the device has no such products."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return 0.0
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t().contiguous().t()
    one = torch.ones((), device=device)

    def product(_: int) -> Tensor:
        return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    return operations / measure(product, device, seconds).least


def empty_kernel_seconds(device: torch.device, seconds: float) -> float:
    """The floor of the tax: what a launch costs in a graph when it has nothing to do."""
    from troupellm.load_tests.kernels.empty import empty

    launch = empty(device)

    def step(_: int) -> None:
        for _ in range(EMPTY_KERNELS):
            launch()

    return measure(step, device, seconds).median / EMPTY_KERNELS


def _transfer(device: torch.device, seconds: float, *, up: bool) -> float:
    """Bytes per second between pinned memory and the device."""
    host = torch.empty(256 * 2**20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(host.shape, dtype=torch.uint8, device=device)
    spent, moved = 0.0, 0
    while spent < min(seconds, 0.5):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        if up:
            there.copy_(host, non_blocking=True)
        else:
            host.copy_(there, non_blocking=True)
        torch.cuda.synchronize(device)
        spent += time.perf_counter() - begin
        moved += host.numel()
    return moved / spent


def ceiling_text(ceilings: Measured) -> str:
    parts = [f"reads {ceilings.read / 1e9:.1f} GB/s", f"copies {ceilings.copy / 1e9:.1f} GB/s"]
    for name in ("float32", "bfloat16", "int8", "fp8"):
        rate = getattr(ceilings, f"gemm_{name}")
        if rate:
            parts.append(f"{name} products {rate / 1e9:.0f} G/s")
    if ceilings.empty_kernel:
        parts.append(f"an empty kernel {ceilings.empty_kernel * 1e6:.2f} us")
        parts.append(f"to and from the device {ceilings.to_device / 1e9:.1f} and {ceilings.to_host / 1e9:.1f} GB/s")
    parts += [f"{name} was not measured ({why})" for name, why in ceilings.failed.items()]
    return f"{ceilings.device}: " + ", ".join(parts)
