"""The encoder's runner: plans that it must refuse, and which prompts it computes together."""

import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from troupellm.models.batch.row_table import PlanError
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.runner import encoder_runner
from troupellm.models.runner.encoder_runner import BATCH_TOKENS, LEAST_FILL, EncoderRunner, group
from troupellm.models.worker import load_encoder
from troupellm.models.worker.load_encoder import LoadedEncoder
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import BlockCopy, NewRow, SamplingState, StepPlan
from troupellm.protocol.params.pooling import PoolingState
from troupellm.tests.support.checkpoints import tiny_encoder

STATE = PoolingState(task="embed", pooling_type="CLS")
TEXT = [2, 5, 6, 7, 3]


def load(folder: Path, **settings: Any) -> LoadedEncoder:
    config = EngineConfig.from_flat(settings)
    return LoadedEncoder(folder, ConfigReader.load(folder), config, torch.float32, lambda _: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    tiny_encoder.write_encoder(made, tiny_encoder.bert, pooling="cls_token")
    return made


@pytest.fixture
def runner(folder: Path) -> EncoderRunner:
    return load(folder).fresh_runner()


def row(number: int = 0, text: list[int] = TEXT, **changes: Any) -> NewRow:
    made = NewRow(
        row=number,
        epoch=0,
        request_id="",
        token_ids=array("i", text).tobytes(),
        num_prompt_tokens=len(text),
        sampling=SamplingState(),
        blocks=((0,),),
        pooling=STATE,
    )
    return msgspec.structs.replace(made, **changes)


def plan(*rows: NewRow, **changes: Any) -> StepPlan:
    counts = tuple(len(new.token_ids) // 4 for new in rows)
    made = StepPlan(
        step=3,
        engine_epoch=1,
        rows=tuple(new.row for new in rows),
        epochs=(0,) * len(rows),
        starts=(0,) * len(rows),
        counts=counts,
        new_rows=rows,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(row(), counts=(4,)), "reads whole prompts"),
        (plan(row(), starts=(1,), counts=(4,)), "reads whole prompts"),
        (plan(row(), epochs=(1,)), "not known under epoch 1"),
        (plan(row(), new_rows=()), "not known"),
        (plan(row(pooling=None)), "pools prompts"),
        (plan(row(adapter=1)), "pools prompts"),
        (plan(row(embeddings=b"\0" * 4)), "pools prompts"),
        (plan(row(text=[])), "0 tokens"),
        (plan(row(text=[5] * 97)), "97 tokens"),
        (plan(row(), copies=(BlockCopy(0, 1, 2),)), "no cache"),
    ],
)
def test_plans_that_contradict_are_refused(runner: EncoderRunner, wrong: StepPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        runner.run(wrong)


def test_a_row_is_known_until_it_is_retired(runner: EncoderRunner) -> None:
    first = runner.run(plan(row(), row(1, [2, 9, 3])))
    assert (first.step, first.engine_epoch, first.token_counts, first.tokens) == (3, 1, (0, 0), ())
    again = runner.run(plan(row(), new_rows=()))
    assert np.frombuffer(again.pooled[0].vector, "f4") == pytest.approx(
        np.frombuffer(first.pooled[0].vector, "f4"), abs=1e-5
    )
    with pytest.raises(PlanError, match="not newer"):
        runner.run(plan(row()))
    newer = runner.run(plan(row(epoch=1, text=[2, 9, 3]), epochs=(1,)))
    assert np.frombuffer(newer.pooled[0].vector, "f4") == pytest.approx(
        np.frombuffer(first.pooled[1].vector, "f4"), abs=1e-5
    )
    with pytest.raises(PlanError, match="not known"):
        runner.run(plan(row(), new_rows=(), freed_rows=(0,)))


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64], ids=str)
def test_vectors_are_float32_whatever_type_a_host_gives_to_new_tensors(folder: Path, other: torch.dtype) -> None:
    pooled = [STATE, msgspec.structs.replace(STATE, pooling_type="MEAN")]
    steps = plan(*(row(number, pooling=state) for number, state in enumerate(pooled)))
    expected = load(folder).fresh_runner().run(steps).pooled
    before = torch.get_default_dtype()
    torch.set_default_dtype(other)
    try:
        got = load(folder).fresh_runner().run(steps).pooled
    finally:
        torch.set_default_dtype(before)
    assert got == expected


def test_prompts_are_grouped_by_length() -> None:
    draw = random.Random(3)
    for _ in range(50):
        lengths = [draw.choice((1, 2, 3, 30, 200, 511, 512)) for _ in range(draw.randrange(1, 60))]
        rows = [encoder_runner._Row(0, np.zeros(length, np.int32), STATE) for length in lengths]
        groups = group(rows)
        assert sorted(index for members in groups for index in members) == list(range(len(lengths)))
        for members in groups:
            inside = [lengths[index] for index in members]
            assert sum(inside) <= BATCH_TOKENS or len(inside) == 1
            assert min(inside) >= LEAST_FILL * max(inside)


def test_a_context_of_one_token_warms_up(folder: Path) -> None:
    assert load(folder, max_model_len=1).ready(0.0).max_model_len == 1


def test_weights_that_do_not_fit_are_said_before_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_encoder, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="do not fit the memory"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_invariant", True), ("attention_backend", "sdpa"), ("kv_cache_dtype", "int8"),
        ("speculative_config", {"method": "ngram"}),
    ],
)  # fmt: skip
def test_what_is_for_decoders_is_refused(folder: Path, name: str, value: Any) -> None:
    config = EngineConfig.from_flat({name: value})
    with pytest.raises(ConfigError, match=f"{name} is for decoders"):
        ModelWorker(folder).load(config, lambda _: None)
