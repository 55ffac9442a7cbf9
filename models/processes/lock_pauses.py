"""Pauses between operations that each hold the interpreter's lock for tens of milliseconds."""

import time

LARGE = 2**18
"""Items of a list that take some 8 ms to make."""
PAUSE_SECONDS = 0.005


def let_others_run(num_items: int) -> None:
    """Sleep for a moment on a thread that works on so many items.

    An event loop gives the lock up in each of its rounds. Without the pause this thread takes it again at once, and two
    long operations in a row hold the loop up like one.
    """
    if num_items > LARGE:
        time.sleep(PAUSE_SECONDS)
