"""`TROUPE_GUARD=1`: guard bytes around all memory that compiled code writes to, compared after each call.

Buffers of the compiled code have guard bytes of their own (memory.cpp). Tensors that bindings make for results have
them when they come from `empty`. A call that wrote outside of its memory ends in `MemoryOverrun`.
"""

import math
import os
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

SWITCH = "TROUPE_GUARD"
ON = os.environ.get(SWITCH, "").lower() not in ("", "0", "false", "no", "off")
NUM_BYTES, BYTE = 64, 0xA5

_outputs: dict[int, tuple[str, Tensor]] = {}
"""By address of a result: its name, and its memory with the guard bytes, for as long as the result is used."""


class MemoryOverrun(RuntimeError):
    """A compiled function wrote outside of its memory; other memory may be damaged."""


def empty(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`torch.empty` for a result of a compiled function.

    Args:
        name: of the function's argument, for `MemoryOverrun`.
    """
    if not ON:
        return torch.empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.full((NUM_BYTES + size + NUM_BYTES,), BYTE, dtype=torch.uint8)
    result = memory[NUM_BYTES : NUM_BYTES + size].view(dtype).view(shape)
    address = memory.data_ptr() + NUM_BYTES
    _outputs[address] = name, memory
    weakref.finalize(result, _outputs.pop, address, None)
    return result


def overrun_argument(given: Iterable[object]) -> str | None:
    """The name of a result among a call's arguments outside of which something was written; None where there is none.

    Args:
        given: the arguments; results stand there by their addresses.
    """
    for address in given:
        name, memory = _outputs.get(address, _NONE) if isinstance(address, int) else _NONE
        if memory is not None and not _intact(memory):
            return name
    return None


_NONE: tuple[str, Tensor | None] = ("", None)


def _intact(memory: Tensor) -> bool:
    return bool((memory[:NUM_BYTES] == BYTE).all() and (memory[-NUM_BYTES:] == BYTE).all())
