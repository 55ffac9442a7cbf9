"""How much of the memory that the weights leave the cache gets."""

import torch

from troupellm.load_tests.gpu.engine import LARGE, Models
from troupellm.load_tests.gpu.gathered import Found
from troupellm.load_tests.roofline import SIZES

SEQUENCES, CONTEXT, STEP_TOKENS = 256, 8192, 2048
"""So many and so long that their cache would fill two devices: no limit but memory's holds it back."""
STEPS = 16


def cache_share(models: Models) -> Found:
    """G25: bytes of the cache that the engine takes by itself, where it may use all memory, over those that were free
    less the weights'. The memory kept for activations and graphs must be enough: a prompt as large as a step,
    graphs and steps go before the number counts."""
    more = {
        "num_gpu_blocks_override": None, "gpu_memory_utilization": 1.0, "max_num_batched_tokens": STEP_TOKENS,
        "max_num_prefill_tokens": STEP_TOKENS,
    }  # fmt: skip
    models.free()
    before = torch.cuda.mem_get_info(models.device)[0]
    with models.worker(LARGE, SEQUENCES, CONTEXT, **more) as worker:
        ready = worker.ready
        worker.capture_graphs()
        worker.fill(SEQUENCES, STEP_TOKENS // SEQUENCES, STEPS + 2)
        worker.step_seconds(STEPS)
        left = torch.cuda.mem_get_info(models.device)[0]
    held = ready.num_blocks * ready.block_size * SIZES[LARGE].kv_numbers * 2
    free = before - ready.weight_bytes
    return {"share": held / free}, {
        "cache GiB": held / 2**30,
        "free GiB": free / 2**30,
        "still free GiB": left / 2**30,
        "cache tokens": ready.num_blocks * ready.block_size,
    }
