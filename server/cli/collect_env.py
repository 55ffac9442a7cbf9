"""`troupellm collect-env`: what a bug report needs. Prints no keys, names of users or hosts, nor other variables."""

import argparse
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "troupellm",
    "torch",
    "numpy",
    "anyio",
    "uvloop",
    "msgspec",
    "hypercorn",
    "h11",
    "httpx",
    "safetensors",
    "tokenizers",
    "jinja2",
    "huggingface-hub",
    "prometheus-client",
    "transformers",
    "openai",
    "triton",
)
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TROUPE_NATIVE",
    "TROUPE_GUARD",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "TORCH_LOGS",
)
"""Printed when set; none of them holds a secret."""
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve", "bf16")
GIB = 2**30


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("collect-env", help="print what a bug report needs", allow_abbrev=False)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    for title, lines in (
        ("System", _system()),
        ("Packages", _packages()),
        ("torch", _torch()),
        ("Environment", _environment()),
    ):
        print(f"{title}:")
        for name, value in lines:
            print(f"  {name}: {value}")
    return 0


def _system() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    yield "machine", platform.machine()
    model, flags = _cpu()
    if model:
        yield "cpu", model
    yield "cpu flags", " ".join(flag for flag in CPU_FLAGS if flag in flags) or "unknown"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", f"{usable} usable of {os.cpu_count()}"
    total, available = _memory()
    if total:
        yield "memory", f"{total / GIB:.1f} GiB, {available / GIB:.1f} GiB available"


def _cpu() -> tuple[str, frozenset[str]]:
    """Name and feature flags as Linux tells them; empty elsewhere."""
    fields: dict[str, str] = {}
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name", platform.processor()), frozenset(flags.split())


def _memory() -> tuple[int, int]:
    """Bytes in all and available; zeros where they cannot be read."""
    sizes = {}
    for line in _lines("/proc/meminfo"):
        name, _, value = line.partition(":")
        number = value.split()
        if number and number[0].isdigit():
            sizes[name] = int(number[0]) * 1024
    return sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _packages() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _torch() -> Iterator[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        yield "import", f"failed: {error}"
        return
    yield "version", torch.__version__
    yield "threads", f"{torch.get_num_threads()} intra-op, {torch.get_num_interop_threads()} inter-op"
    yield "cpu capability", torch.backends.cpu.get_cpu_capability()
    yield "built for cuda", str(torch.version.cuda)
    if not torch.cuda.is_available():
        yield "gpu", "none"
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        yield f"gpu {index}", f"{properties.name}, {properties.total_memory / GIB:.1f} GiB, capability {capability}"


def _environment() -> Iterator[tuple[str, str]]:
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]
