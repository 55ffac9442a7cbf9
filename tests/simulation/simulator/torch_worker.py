"""The tiny torch model as the simulation's worker, and its right answers: what it says to each prompt alone.

Imports torch, so only the seeds that want it import this.
"""

import struct
import tempfile
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import torch

from simulator.model import Language
from troupellm.actors.output.detokenizer import TextTables
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.models.worker.worker import LaunchedStep, ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import NewRow, ProgressSink, SamplingState, StepPlan, StepResult, WorkerReady
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.tests.support.checkpoints.tiny_model import LOGITS_WIDTH, write_tiny_model

_SOLO_BLOCK = 16
_SOLO_TOKENS = 1024


@cache
def _model() -> ModelRunner:
    """Loaded once per process; only its weights are shared."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_model(Path(name) / "tiny")
        worker = ModelWorker(folder)
        worker.load(EngineConfig.from_flat({"num_gpu_blocks_override": 64}), lambda progress: None)
    assert worker._runner is not None
    return worker._runner


def _runner(num_blocks: int, block_size: int, max_model_len: int) -> ModelRunner:
    decoder = _model().decoder
    kv_cache = KVCache(decoder.config, num_blocks, block_size, torch.float32)
    return ModelRunner(decoder, kv_cache, max_model_len=max_model_len)


class TinyTorchWorker:
    """A `protocol.worker.Worker` with a cache of the wanted size."""

    def __init__(self, ready: WorkerReady) -> None:
        self._ready = ready
        self.num_computed = 0
        self.reset()

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        return self._ready

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return LaunchedStep(plan.step, plan)

    def collect(self, ticket: LaunchedStep) -> StepResult:
        self.num_computed += sum(ticket.plan.counts)
        return self._runner.run(ticket.plan)

    def reset(self) -> None:
        ready = self._ready
        self._runner = _runner(ready.num_blocks, ready.block_size, ready.max_model_len)

    def close(self) -> None:
        pass


@lru_cache(4096)
def _solo(prompt: tuple[int, ...], sampling: SamplingState, count: int) -> tuple[int, ...]:
    """One row alone, prefilled in one step."""
    runner = _runner(_SOLO_TOKENS // _SOLO_BLOCK, _SOLO_BLOCK, _SOLO_TOKENS)
    row = NewRow(
        row=0,
        epoch=0,
        request_id="solo",
        token_ids=struct.pack(f"<{len(prompt)}i", *prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        blocks=(tuple(range(_SOLO_TOKENS // _SOLO_BLOCK)),),
    )
    said: list[int] = []
    for step in range(count):
        start = 0 if step == 0 else len(prompt) + step - 1
        plan = StepPlan(
            step=step,
            engine_epoch=0,
            rows=(0,),
            epochs=(0,),
            starts=(start,),
            counts=(len(prompt) if step == 0 else 1,),
            new_rows=(row,) if step == 0 else (),
        )
        said.extend(runner.run(plan).tokens)
    return tuple(said)


def _continuation(prompt: Sequence[int], params: SamplingParams, fork: int, count: int, start: int) -> Sequence[int]:
    stops = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stops |= torch_language().eos
    sampling = SamplingState(
        temperature=params.temperature,
        seed=params.seed or 0,
        fork=fork if params.temperature else 0,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(sorted(stops)) if params.min_tokens else (),
    )
    return _solo(tuple(prompt), sampling, count)


@cache
def torch_language() -> Language:
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Tokenizer.load(write_tiny_model(Path(name) / "tiny"))
    return Language(tokenizer, TextTables(tokenizer), LOGITS_WIDTH, tokenizer.eos_token_ids, _continuation)
