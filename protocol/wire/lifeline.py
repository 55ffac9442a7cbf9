"""A child process must not outlive its parent, for every cause of the parent's death."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when the thread that started it ends, as it does with its process.

    Only Linux can; elsewhere the end of the inherited socket has to do.

    Args:
        parent: process id of who started this process.

    Returns:
        False when the parent is dead already, so that nothing will tell.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent
