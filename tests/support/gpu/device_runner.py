"""The device's runner with a CPU as its device, and what plans give there beside what they gave the CPU's runner."""

from collections import deque
from typing import Any

import msgspec
import numpy as np
import torch

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.gpu.device import CpuDevice
from troupellm.models.gpu.launched_step import LaunchedPlan
from troupellm.models.gpu.runner import CudaRunner
from troupellm.protocol.messages.worker import MOST_LAUNCHED, StepPlan, StepResult
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.gpu.tensor_attention import plan_tensors
from troupellm.tests.support.workers.plan_script import Script, plain

NUM_BLOCKS, BLOCK_SIZE = 120, 8


def device_runner(pair: Pair, sizes: tuple[int, ...] = (1, 2, 4), **more: Any) -> CudaRunner:
    """Captures take no time here, so that there is one before every step while any is missing."""
    cache = KVCache(pair.config, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32)
    cache.storage.fill_(float("nan"))  # unwritten entries may not be read
    settings: dict[str, Any] = {"device": CpuDevice(), "clock": lambda: 0.0, **more}
    return CudaRunner(pair.decoder, cache, max_model_len=MAX_LEN, plan=plan_tensors, capture_sizes=sizes, **settings)


def replay(runner: CudaRunner, plans: list[StepPlan]) -> list[StepResult]:
    """Two plans under way at any time."""
    under_way: deque[LaunchedPlan] = deque()
    results = []
    for plan in plans:
        under_way.append(runner.launch(plan))
        if len(under_way) == MOST_LAUNCHED:
            results.append(plain(runner.collect(under_way.popleft())))
    return results + [plain(runner.collect(ticket)) for ticket in under_way]


def check(got: list[StepResult], expected: list[StepResult]) -> None:
    """Equal, log-probabilities up to rounding: the attention sums in another order."""
    for one, other in zip(got, expected, strict=True):
        described = [(*result.logprobs, *result.prompt_logprobs) for result in (one, other)]
        for mine, theirs in zip(*described, strict=True):
            values = [np.frombuffer(entry.logprobs, np.float32) for entry in (mine, theirs)]
            np.testing.assert_allclose(*values, atol=1e-3)
            assert msgspec.structs.replace(mine, logprobs=b"") == msgspec.structs.replace(theirs, logprobs=b"")
        assert bare(one) == bare(other)


def bare(result: StepResult) -> StepResult:
    return msgspec.structs.replace(result, logprobs=(), prompt_logprobs=())


def script(pair: Pair) -> Script:
    return Script(pair.runner(NUM_BLOCKS, BLOCK_SIZE), NUM_BLOCKS)
