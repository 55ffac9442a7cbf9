"""Compiles kernels for a GPU on a machine without one, and reads properties of the compiled code.

Needs the tools that the triton package brings (ptxas, cuobjdump), no driver and no device. It does not work under the
interpreter, whose decorated functions cannot be compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from troupellm.kernels.common.triton import Launch

HOPPER = 90
SHARED_BYTES = 227 * 1024
"""Shared memory of one program on sm_90."""


@dataclass(frozen=True, slots=True)
class Report:
    """Properties of one compiled kernel."""

    registers: int
    """Per thread."""
    spilled_bytes: int
    """Stack and local memory per thread."""
    shared_bytes: int
    """Per program."""
    ptx: str

    def count(self, instruction: str) -> int:
        """Number of occurrences of an instruction in the PTX, e.g. "mma.sync", "wgmma.mma_async", "cp.async.cg"."""
        return len(re.findall(rf"^\s*(?:@\S+\s+)?{re.escape(instruction)}", self.ptx, re.MULTILINE))

    def buffers(self, tile_bytes: int) -> int:
        """Number of tiles of the pipelined loads that are in shared memory at once."""
        return self.shared_bytes // tile_bytes


def compile_for(
    kernel: Any,
    arguments: Mapping[str, str],
    launch: Launch,
    constants: Mapping[str, Any] | None = None,
    capability: int = HOPPER,
) -> Report:
    """Compile one kernel.

    Args:
        kernel: a `triton.jit` function.
        arguments: type of each argument that is no constant, e.g. {"query": "*bf16", "rows": "i32"}. Pointers and
            whole numbers count as divisible by 16, which is what a launch finds of real ones; write "i32:1" or
            "*i64:1" where not.
        constants: arguments that are constants, beside those of `launch`; None stands for a pointer that is not given.
    """
    fixed = {**(constants or {}), **launch.constants}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else arguments[name].removesuffix(":1") for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in fixed and arguments[name][0] in "*i" and not arguments[name].endswith(":1")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.compiling)
    usage = _resource_usage(compiled.asm["cubin"])
    return Report(
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=int(compiled.metadata.shared),
        ptx=compiled.asm["ptx"],
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and more, as the disassembler reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", listing)}
