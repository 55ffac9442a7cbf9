"""The cost of capturing the graphs of all default batch sizes of an engine."""

from troupellm.load_tests.gpu.engine import LARGE, Models
from troupellm.load_tests.gpu.gathered import Found

BATCH, CONTEXT = 256, 1024
BLOCKS = 4096
"""Of the cache: capturing needs none."""


def all_sizes(models: Models) -> Found:
    """G17. The second time counts: what kernels have to be compiled is compiled by then, as it is for a server that
    was started before. Bytes are those of device memory that is free before and after each capture."""
    more = {"cudagraph_capture_sizes": (), "num_gpu_blocks_override": BLOCKS}
    with models.worker(LARGE, BATCH, CONTEXT, **more) as worker:
        first = worker.capture_graphs()
        worker.renew()
        again = worker.capture_graphs()
    if first is None or again is None or not again.captured:
        raise RuntimeError("there was no graph to capture")
    gib = again.bytes / 2**30
    return {"seconds": again.seconds, "GiB": gib}, {
        "graphs": again.captured,
        "the first time s": first.seconds,
        "the first time GiB": first.bytes / 2**30,
    }
