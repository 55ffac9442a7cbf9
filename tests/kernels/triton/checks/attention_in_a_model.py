"""A whole model served with the Triton back end writes the tokens that it writes with the reference."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from troupellm.kernels.common.triton import interpreting
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan

PROMPTS = (tuple(range(5, 24)), (7, 3, 9), tuple(range(60, 72)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = transformers.MistralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        sliding_window=8,
    )
    transformers.MistralForCausalLM(config).save_pretrained(folder)
    return folder


def tokens(folder: Path, backend: str) -> list[list[int]]:
    """A prompt in one step and one in two chunks beside a row that decodes, then all rows decode."""
    worker = ModelWorker(folder)
    flat = {"num_gpu_blocks_override": 24, "block_size": 4, "attention_backend": backend}
    worker.load(EngineConfig.from_flat(flat), lambda progress: None)
    rows = tuple(
        NewRow(
            row=row,
            epoch=0,
            request_id=str(row),
            token_ids=np.array(prompt, dtype="<i4").tobytes(),
            num_prompt_tokens=len(prompt),
            sampling=SamplingState(temperature=0.0),
            blocks=(tuple(range(8 * row, 8 * row + 8)),),
        )
        for row, prompt in enumerate(PROMPTS)
    )
    spans = (
        ({0: (0, 19)}, rows[:1]),
        ({0: (19, 1), 1: (0, 3), 2: (0, 7)}, rows[1:]),
        ({0: (20, 1), 1: (3, 1), 2: (7, 5)}, ()),
        ({0: (21, 1), 1: (4, 1), 2: (12, 1)}, ()),
    )
    found = []
    for step, (span, new) in enumerate(spans):
        plan = StepPlan(
            step=step,
            engine_epoch=0,
            rows=tuple(span),
            epochs=(0,) * len(span),
            new_rows=new,
            starts=tuple(start for start, _ in span.values()),
            counts=tuple(count for _, count in span.values()),
        )
        found.append(list(worker.collect(worker.launch(plan)).tokens))
    worker.close()
    return found


@pytest.mark.skipif(not interpreting(), reason="the model is on the CPU")
def test_a_model_with_triton_attention_gives_the_same_tokens(folder: Path) -> None:
    expected = tokens(folder, "reference")
    assert sum(map(len, expected)) == 1 + 2 + 3 + 3
    assert tokens(folder, "triton") == expected
