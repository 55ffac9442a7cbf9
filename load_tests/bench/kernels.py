"""`bench kernels`: every operation, correct first, then how near it comes to what the device did just before."""

import argparse
import json
import sys
from pathlib import Path

import msgspec
import torch

from troupellm.load_tests.kernels.ceilings import Measured, ceiling_text, measure_ceilings
from troupellm.load_tests.kernels.checks import Check, check
from troupellm.load_tests.kernels.shapes import Shapes, Work
from troupellm.load_tests.kernels.timing import Timing, measure
from troupellm.load_tests.random_model import SHAPES
from troupellm.load_tests.roofline import SIZES, ModelSize


class Found(msgspec.Struct, frozen=True):
    """One operation at one shape."""

    operation: str
    shape: str
    batch: int
    timing: Timing
    gigabytes_per_s: float
    gigaflops_per_s: float
    fraction: float
    """Of the ceiling: the time that bytes or operations take at least, over the median."""
    bound: str
    """Which of the two takes longer: memory or arithmetic."""


def run(args: argparse.Namespace) -> int:
    """0 when everything is right, 1 when a case is wrong, 2 without the device."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench kernels: there is no CUDA device; --device cpu", file=sys.stderr)
        return 2
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        return _run(args, device)


def _run(args: argparse.Namespace, device: torch.device) -> int:
    args.dtype = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    args.model = args.model or ("125m" if device.type == "cpu" else "qwen3-8b")
    dtype, size = getattr(torch, args.dtype), size_of(args.model)
    ceilings = None if args.check_only else measure_ceilings(device, args.seconds)
    if ceilings is not None:
        print(ceiling_text(ceilings), flush=True)
        print(f"\n{'':<18}{'':<34}{'us':>10}{'least':>10}{'GB/s':>9}{'GFLOP/s':>10}{'of ceiling':>12}")
    checks, found = list[Check](), list[Found]()
    for operation in args.operations:
        checks += check(operation, device)
        wrong = [one for one in checks if one.operation == operation and not one.right]
        for one in wrong:
            print(f"{operation:<18}case {one.case} is WRONG: {one.error:.2g} times what is allowed", flush=True)
        if ceilings is not None and not wrong:
            shapes = Shapes(size, device, dtype, args.context)
            for batch in args.batches:
                for work in shapes.works(operation, batch):
                    found.append(measured(operation, batch, work, device, args.seconds, ceilings))
                    print(line(found[-1]), flush=True)
        _write(args, ceilings, checks, found)
    right = sum(one.right for one in checks)
    print(f"\n{right} of {len(checks)} cases are right")
    if ceilings is not None and device.type == "cuda":  # clocks drift
        print("ceilings afterwards: " + ceiling_text(measure_ceilings(device, args.seconds)))
    return 0 if right == len(checks) else 1


def size_of(model: str) -> ModelSize:
    """Of a public model, or of a benchmark's random one."""
    if model in SIZES:
        return SIZES[model]
    return ModelSize.of({**msgspec.to_builtins(SHAPES[model]), "head_dim": SHAPES[model].head_size})


def measured(operation: str, batch: int, work: Work, device: torch.device, seconds: float, ceilings: Measured) -> Found:
    timing = measure(work.run, device, seconds)
    by_memory = work.bytes / ceilings.read
    flops = ceilings.flops(work.kind)
    by_arithmetic = work.flops / flops if flops else 0.0
    return Found(
        operation=operation,
        shape=work.name,
        batch=batch,
        timing=timing,
        gigabytes_per_s=work.bytes / timing.median / 1e9,
        gigaflops_per_s=work.flops / timing.median / 1e9,
        fraction=max(by_memory, by_arithmetic) / timing.median,
        bound="memory" if by_memory >= by_arithmetic else "arithmetic",
    )


def line(found: Found) -> str:
    return (
        f"{found.operation:<18}{found.shape:<34}{found.timing.median * 1e6:>10.1f}{found.timing.least * 1e6:>10.1f}"
        f"{found.gigabytes_per_s:>9.1f}{found.gigaflops_per_s:>10.1f}{found.fraction:>11.0%} {found.bound}"
    )


def _write(args: argparse.Namespace, ceilings: Measured | None, checks: list[Check], found: list[Found]) -> None:
    if args.result_json:
        content = {
            **{name: getattr(args, name) for name in ("model", "device", "dtype", "context")},
            "ceilings": msgspec.to_builtins(ceilings),
            "checks": [{**msgspec.to_builtins(one), "error": min(one.error, 1e9)} for one in checks],
            "found": msgspec.to_builtins(found),
        }
        Path(args.result_json).write_text(json.dumps(content, indent=1), encoding="utf-8")
