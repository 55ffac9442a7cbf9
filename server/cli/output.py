"""Standard output that may take nothing any more: a pipe whose reader has left, a full disk."""

import os
import sys
from contextlib import suppress


def give_up_output() -> None:
    """Discard pending output, which would fail again when the interpreter ends."""
    with suppress(OSError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, sys.stdout.fileno())
        finally:
            os.close(null)
