"""A row that fails in a step whose successor was planned already."""

from pathlib import Path

import numpy as np
import torch

from troupellm.models.layers.decoder import Decoder
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig, ModelConfig
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model


def new_row(row: int, first: int) -> NewRow:
    return NewRow(
        row=row,
        epoch=0,
        request_id=str(row),
        token_ids=np.arange(first, first + 5, dtype="<i4").tobytes(),
        num_prompt_tokens=5,
        sampling=SamplingState(temperature=0.0),
        blocks=((row,),),
    )


def test_the_next_step_is_unharmed(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    worker = ModelWorker(folder)
    worker.load(EngineConfig(model=ModelConfig(model=str(folder))), lambda progress: None)
    runner = worker.runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.decoder, Decoder)
    runner.decoder.embedding.table[5] = torch.nan
    plan = StepPlan(
        step=0,
        engine_epoch=0,
        rows=(0, 1),
        epochs=(0, 0),
        starts=(0, 0),
        counts=(5, 5),
        new_rows=(new_row(0, 5), new_row(1, 10)),
    )
    next_plan = StepPlan(step=1, engine_epoch=0, rows=(0, 1), epochs=(0, 0), starts=(5, 5), counts=(1, 1))
    for result in [worker.collect(worker.launch(each)) for each in (plan, next_plan)]:
        assert [error.row for error in result.errors] == [0]
        assert result.token_counts == (0, 1)
        assert len(result.tokens) == 1
    worker.close()
