"""A worker on a GPU, with a CPU that is told to be one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from troupellm.models.gpu import placement
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.kv_offload.gpu_mover import MOST_BLOCKS
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan, WorkerReady
from troupellm.tests.support.checkpoints.deepseek_mtp import write_deepseek
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model


def load(folder: Path, **settings: Any) -> tuple[ModelWorker, WorkerReady]:
    worker = ModelWorker(folder)
    return worker, worker.load(EngineConfig.from_flat({"model": str(folder), **settings}), lambda progress: None)


def answer(worker: ModelWorker, steps: int) -> list[int]:
    new = NewRow(
        row=0,
        epoch=1,
        request_id="0",
        token_ids=b"".join(n.to_bytes(4, "little") for n in range(1, 8)),
        num_prompt_tokens=7,
        sampling=SamplingState(temperature=0.0),
        blocks=((0, 1),),
    )
    tickets, tokens = [], list[int]()
    for step in range(steps):
        begin, count = (0, 7) if step == 0 else (6 + step, 1)
        plan = StepPlan(
            step=step,
            engine_epoch=0,
            rows=(0,),
            epochs=(1,),
            starts=(begin,),
            counts=(count,),
            new_rows=(new,) if step == 0 else (),
        )
        tickets.append(worker.launch(plan))
        if len(tickets) == 2:
            tokens += worker.collect(tickets.pop(0)).tokens
    return tokens + [token for ticket in tickets for token in worker.collect(ticket).tokens]


def test_the_worker_serves_from_a_device(tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path)
    settings = {"max_model_len": 64, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    worker, ready = load(tmp_path, **settings)
    assert ready.num_blocks == 4 * 4  # as many as can be of use
    got = answer(worker, 9)
    worker.reset()
    assert answer(worker, 9) == got
    worker.close()
    monkeypatch.undo()
    plain, _ = load(tmp_path, **settings, device="cpu")
    assert answer(plain, 9) == got


def test_what_does_not_fit_is_said_before_anything_is_served(tmp_path: Path, gpu: None) -> None:
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, max_model_len=64, max_num_batched_tokens=64, gpu_memory_utilization=0.2)
    assert caught.value.param == "gpu_memory_utilization"


def test_tokens_drawn_behind_drafts_take_memory(tmp_path: Path, gpu: None) -> None:
    write_tiny_model(tmp_path)

    def taken(**more: Any) -> int:
        worker, ready = load(tmp_path, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, **more)
        worker.close()
        return ready.activation_bytes

    plain = taken()
    assert plain > 0
    for drafts, drawn in ((3, 16), (15, 32)):  # of each row, or all that a step computes
        wanted = {"method": "ngram", "num_speculative_tokens": drafts}
        assert taken(speculative_config=wanted) * 4 == plain * drawn


def test_copies_of_blocks_on_their_way_take_memory(tmp_path: Path, gpu: None) -> None:
    write_tiny_model(tmp_path)

    def taken(**more: Any) -> WorkerReady:
        worker, ready = load(tmp_path, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, **more)
        worker.close()
        return ready

    plain, offloading = taken(), taken(kv_offloading_size="1MiB")
    block = plain.kv_cache_bytes // plain.num_blocks
    assert offloading.activation_bytes - plain.activation_bytes == MOST_BLOCKS * block


def test_memory_is_measured_where_latent_attention_takes_most(
    tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By prompts so short that their queries are absorbed."""
    steps, run = list[tuple[int, ...]](), CudaRunner.run

    def noted(self: CudaRunner, plan: StepPlan) -> Any:
        steps.append(plan.counts)
        return run(self, plan)

    monkeypatch.setattr(CudaRunner, "run", noted)
    monkeypatch.setattr(placement, "expanding_tokens", lambda *_: 12)
    write_deepseek(tmp_path)
    worker, _ = load(tmp_path, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=16)
    worker.close()
    assert steps[0] == (11, 11, 10)


def test_cuda_is_refused_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert placement.find_device("auto") is None
    assert placement.find_device("cpu") is None
    with pytest.raises(ConfigError, match="device cuda cannot be used") as caught:
        placement.find_device("cuda")
    assert caught.value.param == "device"
