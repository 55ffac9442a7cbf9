"""Time without what others took: bounds of a second or less are meant for a machine that has nothing else to do.

The kernel counts, for every thread, how long it was ready to run while others had the cores. Taken off the time that
passed, that leaves the time of the code itself, without other processes beside the test.
"""

import time
from pathlib import Path

THIS_THREAD = "thread-self"


def waited_for_a_core(who: int | str = THIS_THREAD) -> float:
    """Seconds since its start; of a process it is its first thread, where the event loop is. 0 where none are counted.

    Args:
        who: a process id.
    """
    try:
        return int(Path(f"/proc/{who}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def own_time(*others: int) -> float:
    """Seconds on a clock of this thread's own; it stands still while this thread, or one of others, waits for a core.

    Args:
        others: processes that this thread waits for.
    """
    return time.perf_counter() - waited_for_a_core() - sum(waited_for_a_core(pid) for pid in others)
