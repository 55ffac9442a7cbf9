"""Pins ordinary memory, so that a GPU copies from and to it directly.

torch has pinned memory of its own, but rounds sizes up to powers of two, and keeps freed memory.
"""

import logging
from contextlib import suppress

import torch
from torch import Tensor

from troupellm.protocol.errors import ConfigError

logger = logging.getLogger("troupellm.worker")

_PORTABLE = 1
"""cudaHostRegisterPortable: for all devices."""
_STUCK: list[Tensor] = []
"""Memory that could not be unpinned: a device may still write there, so it must not be used again."""


def pin(memory: Tensor) -> None:
    """Lock all pages of the memory, which also allocates them.

    Raises:
        ConfigError: the system does not permit it.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
    if code:
        _clear_error()
        raise ConfigError(
            f"kv_offloading_size: {memory.nbytes} bytes of memory cannot be pinned (CUDA error {code}); lower it",
            param="kv_offloading_size",
        )


def unpin(memory: Tensor) -> None:
    """Before it is freed. Never raises: a device that is broken is no reason to keep more than its memory."""
    code = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))  # type: ignore[no-untyped-call]
    if code:
        _clear_error()
        logger.warning("%d bytes of memory stay taken: they cannot be unpinned (CUDA error %d)", memory.nbytes, code)
        _STUCK.append(memory)


def _clear_error() -> None:
    """Launch something, whose check finds the error that CUDA keeps: the next one would be blamed for it otherwise."""
    with suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(1)
