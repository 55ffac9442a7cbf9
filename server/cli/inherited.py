"""Inherited state that a server cannot use: closed standard streams, blocked and ignored signals."""

import os
import signal
import sys

HEARD = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})
"""Signals that stop a server, or tell of its children."""


def make_usable() -> None:
    """Open standard streams that are closed onto the null device, and let the signals in that a server hears.

    Else a socket would get the number of a closed stream, and the log would be written into it. Call it before anything
    is opened and before any thread starts.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # the lowest number that is free
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # the exit codes of children would be lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
