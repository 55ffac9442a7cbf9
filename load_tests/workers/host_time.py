"""The host's time per decoding step: the GPU's runner over a device that does nothing."""

import time
from collections import deque
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor

from troupellm.kernels.paged_attention import Plan
from troupellm.kernels.paged_attention.backends import Planned
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import RandomWeights
from troupellm.models.config.decoder_config import DecoderConfig, LayerShape, RopeConfig
from troupellm.models.gpu.batch import DeviceSpans
from troupellm.models.gpu.device import CpuDevice, Graph
from troupellm.models.gpu.launched_step import LaunchedPlan
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.layers.cache_layout import View
from troupellm.models.layers.decoder import Decoder
from troupellm.protocol.messages.worker import MOST_LAUNCHED, NewRow, RowChange, SamplingState, StepPlan

BLOCK_SIZE, LENGTH = 16, 4096
WARM_UP_STEPS = 16
MODEL = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=32,
    layers=(LayerShape(num_heads=2, num_kv_heads=1, head_dim=16, rope=RopeConfig(), intermediate_size=32),),
    rms_norm_eps=1e-5,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=False,
    checkpoint_dtype="float32",
)
"""Its size does not matter: graphs compute nothing."""


class HostTime(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds per step, medians."""

    running: int
    launch_us: float
    collect_us: float
    total_us: float


class NullGraph(Graph):
    def replay(self) -> None:
        """Nothing is computed."""


class NullGpu(CpuDevice):
    """Its graphs do nothing. Launches beside them are computed here, in about the time of a launch on a GPU."""

    def capture(self, body: Callable[[], None]) -> Graph:
        body()  # makes the tensors that the graph would write to
        return NullGraph()


class NullAttention:
    """A back end: nothing is attended to."""

    def attend(self, query: Tensor, *_: Any) -> Tensor:
        return torch.zeros_like(query)


def plan_nothing(tables: Tensor, spans: DeviceSpans, view: View) -> Plan:
    """A `models.gpu.batch.GroupPlanner`."""
    backend: Any = NullAttention()
    rows: Any = None
    return Planned(backend, rows)


def host_time(running: int, steps: int) -> HostTime:
    """Greedy decoding, two steps under way, each row with a new block every 16 steps."""
    plans = decode_plans(running, WARM_UP_STEPS + steps)
    blocks = running * (3 + len(plans) // BLOCK_SIZE)
    length = max(LENGTH, len(plans))
    decoder = Decoder(MODEL, RandomWeights(torch.float32), max_model_len=length)
    cache = KVCache(MODEL, blocks + 1, BLOCK_SIZE, torch.float32)
    runner = CudaRunner(
        decoder, cache, NullGpu(), max_model_len=length, plan=plan_nothing, capture_sizes=(running,), slots=running
    )
    under_way = deque[LaunchedPlan]()
    launches, collects = list[float](), list[float]()
    for plan in plans:
        begin = time.perf_counter()
        under_way.append(runner.launch(plan))
        launches.append(time.perf_counter() - begin)
        if len(under_way) == MOST_LAUNCHED:
            begin = time.perf_counter()
            runner.collect(under_way.popleft())
            collects.append(time.perf_counter() - begin)
    launched, collected = launches[WARM_UP_STEPS:], collects[WARM_UP_STEPS - 1 :]
    both = [launch + collect for launch, collect in zip(launched, collected, strict=True)]
    return HostTime(
        running=running,
        launch_us=1e6 * median(launched),
        collect_us=1e6 * median(collected),
        total_us=1e6 * median(both),
    )


def decode_plans(running: int, steps: int) -> list[StepPlan]:
    """Of prompts of one token, so that every step decodes; as the scheduler would write them."""
    rows, ones = tuple(range(running)), (1,) * running
    blocks = count(2 * running)
    new = tuple(
        [
            NewRow(
                row=row,
                epoch=1,
                request_id=str(row),
                token_ids=bytes(4),
                num_prompt_tokens=1,
                sampling=SamplingState(temperature=0.0),
                blocks=((row, running + row),),
            )
            for row in rows
        ]
    )
    plans = []
    for step in range(steps):
        grown = [row for row in rows if (step + row) % BLOCK_SIZE == 0]
        changes = tuple([RowChange(row=row, appended_blocks=((next(blocks),),)) for row in grown])
        plans.append(
            StepPlan(
                step=step,
                engine_epoch=0,
                rows=rows,
                epochs=ones,
                starts=(step,) * running,
                counts=ones,
                new_rows=() if step else new,
                changes=changes if step else (),
            )
        )
    return plans
