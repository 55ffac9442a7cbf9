"""The compiled path of paged attention: built once by the machine's own compiler, or not used.

Nothing depends on it being there: without a compiler, with an unusual one, or when its answer differs from the
reference, `load` gives None and the torch path does the work.
"""

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from troupellm.kernels.paged_attention.reference import paged_attention_reference

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
COMPILE_SECONDS = 120.0
LANES = 16
MAX_HEAD_DIM = 256

Native = Callable[..., None]


def supports(query: Tensor) -> bool:
    """Whether the compiled path takes these heads: float32 on a CPU, head_dim a multiple of 16 up to 256."""
    size = query.shape[-1]
    return query.device.type == "cpu" and query.dtype == torch.float32 and size % LANES == 0 and size <= MAX_HEAD_DIM


def run(native: Native, query: Tensor, caches: tuple[Tensor, Tensor], plan: tuple[Tensor, Tensor], scale: float,
        out: Tensor) -> None:  # fmt: skip
    """Compute the items of a plan.

    Args:
        query: [tokens, heads, head_dim], heads contiguous.
        caches: keys and values [blocks, kv_heads, block_size, head_dim].
        plan: block tables int32 [rows, width] and items int32 [items, 4] (token, row, first key, key past the last).
        out: [tokens, heads, head_dim], heads contiguous; the rows of the items are written.
    """
    tables, items = plan
    _, kv_heads, block_size, head_dim = caches[0].shape
    native(
        query.data_ptr(), query.stride(0), caches[0].data_ptr(), caches[1].data_ptr(), tables.data_ptr(),
        tables.stride(0), items.data_ptr(), items.shape[0], query.shape[1], kv_heads, block_size, head_dim, scale,
        out.data_ptr(), out.stride(0), torch.get_num_threads(),
    )  # fmt: skip


@functools.cache
def load() -> Native | None:
    """The compiled function, built on first use (seconds) and kept beside the source or in the user's cache."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return None
    for folder in _folders():
        library = folder / f"cpu-{_fingerprint(compiler)}.so"
        try:
            if not library.exists():
                _build(compiler, library)
            native = _bind(library)
        except (OSError, subprocess.SubprocessError):
            continue
        return native if _agrees(native) else None
    return None


def _folders() -> tuple[Path, ...]:
    """Where the library may lie; beside the source it goes where compiled Python goes."""
    beside = SOURCE.parent / "__pycache__"
    try:
        return beside, Path.home() / ".cache" / "troupellm"
    except RuntimeError:  # a user without a home
        return (beside,)


def _fingerprint(compiler: str) -> str:
    """Changes with the source, the compiler and the processor that `-march=native` means."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update(" ".join((compiler, *FLAGS, platform.machine(), platform.libc_ver()[1])).encode())
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        flags = [line for line in processor.read_text().splitlines() if line.startswith(("flags", "Features", "model"))]
        digest.update("\n".join(sorted(set(flags))).encode())
    return digest.hexdigest()[:16]


def _build(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
        fresh.replace(library)  # atomic: another process may be doing the same


def _bind(library: Path) -> Native:
    function = ctypes.CDLL(str(library)).paged_attention
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    function.argtypes = [
        pointer, number, pointer, pointer, pointer, number, pointer, number, number, number, number, number,
        ctypes.c_float, pointer, number, number,
    ]  # fmt: skip
    bound: Native = function
    return bound


def _agrees(native: Native) -> bool:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 32, generator=generator)
    keys = torch.randn(5, 2, 7, 32, generator=generator)
    values = torch.randn(5, 2, 7, 32, generator=generator)
    tables = torch.tensor([[3, 1, 4], [0, 2, 0]], dtype=torch.int32)
    items = torch.tensor([[0, 0, 2, 20], [1, 1, 0, 9]], dtype=torch.int32)
    out = torch.empty_like(query)
    run(native, query, (keys, values), (tables, items), 0.2, out)
    expected = paged_attention_reference(query, keys, values, tables, items, scale=0.2)
    return torch.allclose(out, expected, atol=1e-5)
