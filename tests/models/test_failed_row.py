"""A row that fails in a step whose successor was planned already."""

from pathlib import Path

import numpy as np
import torch
from tiny_model import write_tiny_model

from troupellm.models.decoder import Decoder
from troupellm.models.worker import ModelWorker
from troupellm.protocol.config import EngineConfig, ModelConfig
from troupellm.protocol.worker import NewRow, SamplingState, StepPlan


def new_row(row: int) -> NewRow:
    return NewRow(
        row=row,
        epoch=0,
        request_id=str(row),
        token_ids=np.arange(5, dtype="<i4").tobytes(),
        num_prompt_tokens=5,
        sampling=SamplingState(temperature=0.0),
        blocks=((row,),),
    )


def test_the_next_step_is_unharmed(tmp_path: Path, monkeypatch) -> None:
    folder = write_tiny_model(tmp_path / "model")
    worker = ModelWorker(folder)
    worker.load(EngineConfig(model=ModelConfig(model=str(folder))), lambda progress: None)
    healthy = Decoder.logits

    def poisoned(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        logits = healthy(self, hidden)
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(Decoder, "logits", poisoned)
    plan = StepPlan(
        step=0,
        engine_epoch=0,
        rows=(0, 1),
        epochs=(0, 0),
        starts=(0, 0),
        counts=(5, 5),
        new_rows=(new_row(0), new_row(1)),
    )
    next_plan = StepPlan(step=1, engine_epoch=0, rows=(0, 1), epochs=(0, 0), starts=(5, 5), counts=(1, 1))
    for result in [worker.collect(worker.launch(each)) for each in (plan, next_plan)]:
        assert [error.row for error in result.errors] == [0]
        assert result.token_counts == (0, 1)
        assert len(result.tokens) == 1
    worker.close()
