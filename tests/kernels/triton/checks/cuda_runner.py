"""The device's runner over the real kernels: eager and replayed, two steps under way, against the CPU's runner."""

from collections import deque
from pathlib import Path

import pytest
import torch

from tests.support.decoder_pairs import FAMILIES, MAX_LEN, Pair, make_prompt
from tests.support.plan_script import Script
from troupellm.kernels.triton_support import check_device
from troupellm.models.checkpoint import Checkpoint
from troupellm.models.cuda.batch import triton_planner
from troupellm.models.cuda.device import CpuDevice, CudaDevice
from troupellm.models.cuda.runner import CudaRunner, LaunchedPlan
from troupellm.models.cuda.weights import OnDevice
from troupellm.models.decoder import EMBEDDING, Decoder
from troupellm.models.kv_cache import KVCache
from troupellm.models.weight_names import decoder_weights
from troupellm.protocol.worker import MOST_LAUNCHED, StepPlan

DEVICE = check_device()
ON_GPU = DEVICE.type == "cuda"
NUM_BLOCKS, BLOCK_SIZE = 24, 16


def runner(pair: Pair, sizes: tuple[int, ...]) -> CudaRunner:
    decoder = pair.decoder
    if ON_GPU:
        source = decoder_weights(pair.config, Checkpoint(pair.folder, torch.float32), EMBEDDING)
        decoder = Decoder(pair.config, OnDevice(source, DEVICE), max_model_len=MAX_LEN)
    cache = KVCache(pair.config, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32, DEVICE)
    cache.storage.fill_(float("nan"))
    plan = triton_planner(pair.config, BLOCK_SIZE, torch.float32, invariant=False)
    device = CudaDevice() if ON_GPU else CpuDevice()
    return CudaRunner(decoder, cache, device, max_model_len=MAX_LEN, plan=plan, capture_sizes=sizes)


def replay(made: CudaRunner, plans: list[StepPlan]) -> list[tuple[int, ...]]:
    under_way: deque[LaunchedPlan] = deque()
    tokens = []
    for plan in plans:
        under_way.append(made.launch(plan))
        if len(under_way) == MOST_LAUNCHED:
            tokens.append(made.collect(under_way.popleft()).tokens)
    return tokens + [made.collect(ticket).tokens for ticket in under_way]


def told(pair: Pair, steps: int) -> Script:
    script = Script(pair.runner(NUM_BLOCKS, BLOCK_SIZE), NUM_BLOCKS)
    script.add(0, make_prompt(21))
    script.step({0: 13})
    script.add(1, make_prompt(5, 1), temperature=0.8, seed=4)
    script.step({0: 8, 1: 5})
    script.add(2, make_prompt(30, 2), temperature=1.1, seed=9, top_k=9, top_p=0.8)
    script.step({0: 1, 2: 30, 1: 1})
    script.decode(2, 0, 1, steps=steps)
    script.decode(1, 2, steps=1)
    return script


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_plans(tmp_path: Path, family: str) -> None:
    pair = Pair(tmp_path, FAMILIES[family]())
    script = told(pair, 2)
    assert replay(runner(pair, (4,)), script.plans) == [result.tokens for result in script.results]


@pytest.mark.skipif(not ON_GPU, reason="only a GPU can be waited for")
def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    pair = Pair(tmp_path, FAMILIES["qwen3"]())
    script = told(pair, 12)
    made = runner(pair, (2, 4))
    replay(made, script.plans)  # compiles and captures
    assert made.graphs.dispatcher.missing == 0
    again = [StepPlan(step=99, engine_epoch=0, rows=(), epochs=(), starts=(), counts=(), retired=(0, 1, 2))]
    replay(made, again)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tickets: deque[LaunchedPlan] = deque()
        for plan in script.plans:
            if len(tickets) == MOST_LAUNCHED:
                torch.cuda.set_sync_debug_mode("default")  # whoever collects sleeps on an event
                made.collect(tickets.popleft())
                torch.cuda.set_sync_debug_mode("error")
            tickets.append(made.launch(plan))
    finally:
        torch.cuda.set_sync_debug_mode("default")
