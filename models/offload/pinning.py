"""Ordinary memory that a GPU copies from and to without a detour.

torch has pinned memory of its own, but in powers of two, which may be twice what was asked for, and it keeps what is
freed.
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
"""That could not be unpinned: a device may write there still, so nobody else may get it."""


def pin(memory: Tensor) -> None:
    """Lock the pages of it all, which takes them.

    Raises:
        ConfigError: the system does not let it.
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
