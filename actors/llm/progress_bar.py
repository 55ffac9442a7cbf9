"""The progress bar of the synchronous door."""

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[type-arg]
    """Without the thread that tqdm would leave running."""

    monitor_interval = 0
