"""The worker: load, launch, collect, close; and what the runner does with plans of every kind."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from troupellm.models.batch.row_table import PlanError
from troupellm.models.runner import runner
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError, ModelLoadError
from troupellm.protocol.messages.worker import (
    BlockCopy,
    BlockTransfer,
    LoadProgress,
    NewRow,
    RowChange,
    SamplingState,
    StepPlan,
    StepResult,
    WorkerReady,
)
from troupellm.tests.support.engines.inside import runner_of

GREEDY = SamplingState(temperature=0.0)
PROMPT = (5, 17, 120, 3, 44, 9, 201, 8, 77, 30)
SETTINGS = {"num_gpu_blocks_override": 12, "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.4,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path, **settings: object) -> tuple[ModelWorker, WorkerReady, list[LoadProgress]]:
    worker, seen = ModelWorker(folder), []
    ready = worker.load(EngineConfig.from_flat({**SETTINGS, **settings}), seen.append)
    return worker, ready, seen


@pytest.fixture
def worker(folder: Path) -> ModelWorker:
    return load(folder)[0]


def new_row(
    row: int = 0,
    tokens: tuple[int, ...] = PROMPT,
    blocks: tuple[int, ...] = (7, 2, 9),
    *,
    epoch: int = 0,
    sampling: SamplingState = GREEDY,
) -> NewRow:
    ids = np.array(tokens, dtype="<i4").tobytes()
    return NewRow(
        row=row,
        epoch=epoch,
        request_id=str(row),
        token_ids=ids,
        num_prompt_tokens=len(tokens),
        sampling=sampling,
        blocks=(blocks,),
    )


def step(worker: ModelWorker, spans: dict[int, tuple[int, int]], **parts: object) -> StepResult:
    """spans: row -> (start, count)."""
    epochs = parts.pop("epochs", (0,) * len(spans))
    plan = StepPlan(
        step=1,
        engine_epoch=6,
        rows=tuple(spans),
        epochs=epochs,
        starts=tuple(start for start, _ in spans.values()),
        counts=tuple(count for _, count in spans.values()),
        **parts,
    )
    ticket = worker.launch(plan)
    assert ticket.step == 1
    return worker.collect(ticket)


def answer(worker: ModelWorker, row: int, tokens: int, **changes: object) -> list[int]:
    """Prefill in one go, then decode."""
    given = new_row(row, **changes)
    length = len(given.token_ids) // 4
    found = list(step(worker, {row: (0, length)}, new_rows=(given,)).tokens)
    while len(found) < tokens:
        found += step(worker, {row: (length, 1)}).tokens
        length += 1
    return found


def test_the_worker_reports_the_sizes_it_has_chosen(folder: Path) -> None:
    worker, ready, seen = load(folder)
    assert (ready.vocab_width, ready.num_blocks, ready.block_size, ready.max_model_len) == (256, 12, 4, 48)
    assert (ready.device, ready.dtype, ready.architecture) == ("cpu", "float32", "LlamaForCausalLM")
    assert ready.groups[0].num_layers == 2
    assert ready.groups[0].sliding_window is None
    parameters = transformers.LlamaForCausalLM.from_pretrained(folder).num_parameters()
    assert ready.num_parameters == parameters
    assert ready.kv_cache_bytes == 12 * 4 * 2 * 2 * 16 * 4
    phases = [progress.phase for progress in seen]
    assert sorted(set(phases), key=phases.index) == ["weights", "kv_cache", "warm_up"]
    assert "KV cache" in seen[0].detail
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="launch was called before load, or after close"):
        worker.launch(StepPlan(step=0, engine_epoch=0, rows=(), epochs=(), starts=(), counts=()))


def test_results_name_the_plan_and_its_rows(worker: ModelWorker) -> None:
    result = step(worker, {3: (0, 10), 8: (0, 2)}, new_rows=(new_row(3), new_row(8, PROMPT[:3], (1,))))
    assert (result.step, result.engine_epoch, result.rows, result.epochs) == (1, 6, (3, 8), (0, 0))
    assert result.token_counts == (1, 0)
    assert len(result.tokens) == 1
    assert min(result.timings.prepare, result.timings.forward, result.timings.sample) > 0


def test_an_empty_plan_only_forgets(worker: ModelWorker) -> None:
    step(worker, {0: (0, 10)}, new_rows=(new_row(),))
    result = step(worker, {}, freed_rows=(0, 99))
    assert (result.rows, result.tokens) == ((), ())
    with pytest.raises(PlanError, match="row 0 is not known"):
        step(worker, {0: (10, 1)})


def test_a_token_can_be_named_before_the_host_has_seen_it(worker: ModelWorker) -> None:
    expected = answer(worker, 0, 3)
    plans = [
        StepPlan(step=number, engine_epoch=0, rows=(1,), epochs=(0,), starts=(start,), counts=(count,), new_rows=new)
        for number, (start, count, new) in enumerate([(0, 10, (new_row(1, blocks=(3, 4, 5)),)), (10, 1, ())])
    ]
    tickets = [worker.launch(plan) for plan in plans]
    assert [token for ticket in tickets for token in worker.collect(ticket).tokens] == expected[:2]


def test_a_prefix_hit_and_a_copied_block_give_the_same_tokens(worker: ModelWorker) -> None:
    expected = answer(worker, 0, 2)
    shared = new_row(1, blocks=(7, 2, 11))
    hit = step(worker, {1: (8, 2)}, new_rows=(shared,))
    assert hit.tokens == tuple(expected[:1])
    copied = step(worker, {2: (8, 2)}, new_rows=(new_row(2, blocks=(7, 5, 6)),), copies=(BlockCopy(0, 2, 5),))
    assert copied.tokens == tuple(expected[:1])


def test_a_newer_epoch_replaces_a_row(worker: ModelWorker) -> None:
    expected = answer(worker, 0, 3)
    step(worker, {0: (0, 4)}, new_rows=(new_row(0, PROMPT[:4], (1,), epoch=1),), epochs=(1,))
    resumed = (*PROMPT, *expected[:2])
    result = step(worker, {0: (0, 12)}, new_rows=(new_row(0, resumed, (4, 0, 8), epoch=2),), epochs=(2,))
    assert result.tokens == tuple(expected[2:3])


def test_a_reused_row_number_leaves_nothing_behind(worker: ModelWorker) -> None:
    expected = answer(worker, 0, 3)
    step(worker, {}, freed_rows=(0,))
    answer(worker, 0, 2, sampling=SamplingState(temperature=2.0, logit_bias=((3, 50.0),)))
    step(worker, {}, freed_rows=(0,))
    assert answer(worker, 0, 3) == expected


def test_sampling_options_reach_the_sampler_and_can_change(worker: ModelWorker) -> None:
    forced = SamplingState(temperature=0.0, logit_bias=((42, 1000.0),))
    assert step(worker, {0: (0, 10)}, new_rows=(new_row(sampling=forced),)).tokens == (42,)
    other = SamplingState(temperature=0.0, allowed_token_ids=(9,))
    assert step(worker, {0: (10, 1)}, changes=(RowChange(row=0, sampling=other),)).tokens == (9,)


@pytest.mark.parametrize(("piece", "positions"), [(256, [1, 5]), (3, [1, 3, 5, 8])])
def test_logprobs_of_tokens_and_prompts(
    folder: Path, worker: ModelWorker, piece: int, positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PIECE_TOKENS", piece)
    state = SamplingState(temperature=0.0, logprobs=0, prompt_logprobs=0)
    given = new_row(sampling=state)
    parts = [step(worker, {0: (0, 4)}, new_rows=(given,)), step(worker, {0: (4, 6)})]
    described = [part for result in parts for part in result.prompt_logprobs]
    assert [part.position for part in described] == positions
    ids = np.concatenate([np.frombuffer(part.token_ids, "<i4") for part in described])
    values = np.concatenate([np.frombuffer(part.logprobs, "<f4") for part in described])
    assert ids.tolist() == list(PROMPT[1:])
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    np.testing.assert_allclose(values, expected[range(9), PROMPT[1:]].numpy(), atol=1e-4)
    generated = parts[1].logprobs[0]
    assert (generated.row, generated.position) == (0, 10)
    assert np.frombuffer(generated.logprobs, "<f4")[0] == pytest.approx(float(expected[9].max()), abs=1e-4)


def test_nan_fails_its_own_row_only(worker: ModelWorker) -> None:
    expected = answer(worker, 0, 2)
    runner_of(worker).cache.storage[:, :, 11] = float("nan")
    rows = (new_row(1, blocks=(7, 2, 5)), new_row(2, blocks=(11, 3, 4)), new_row(3, blocks=(7, 2, 6)))
    result = step(worker, {1: (8, 2), 2: (4, 6), 3: (8, 2)}, new_rows=rows)
    assert result.token_counts == (1, 0, 1)
    assert result.tokens == (expected[0], expected[0])
    assert [error.row for error in result.errors] == [2]


@pytest.mark.parametrize(
    ("spans", "parts", "message"),
    [
        ({5: (0, 1)}, {}, "row 5 is not known"),
        ({0: (0, 1)}, {"epochs": (4,)}, "row 0: wrong epoch"),
        ({0: (11, 1)}, {}, "row 0: wrong span beyond its tokens"),
        ({0: (0, 0)}, {}, "row 0: wrong count of tokens"),
        ({1: (0, 10)}, {"new_rows": (new_row(1, blocks=(1,)),)}, "row 1: wrong span beyond its blocks"),
        ({1: (0, 10)}, {"new_rows": (new_row(1, blocks=(1, 2, 12)),)}, "block 12 of 12 was named"),
        ({1: (0, 1)}, {"new_rows": (new_row(1, tokens=(1,) * 49),)}, "row 1: 49 tokens, the context holds 48"),
        ({0: (0, 1)}, {"new_rows": (new_row(0),)}, "row 0: epoch 0 is not newer than 0"),
        ({0: (0, 1)}, {"changes": (RowChange(row=0, appended_blocks=((1,) * 10,)),)}, "row 0: 13 blocks"),
        ({0: (0, 1)}, {"changes": (RowChange(row=0, appended_blocks=((1,), (1,))),)}, "2 cache groups"),
        ({0: (0, 1)}, {"draft_limits": (0,)}, "drafts are not verified"),
        (
            {0: (0, 1)},
            {"transfers": (BlockTransfer(transfer=1, kind="load", tier=0, group=0, block=1, place=0, key=b""),)},
            "no tier to move blocks to",
        ),
    ],
)
def test_plans_that_contradict_what_is_known(
    worker: ModelWorker, spans: dict[int, tuple[int, int]], parts: dict[str, object], message: str
) -> None:
    step(worker, {0: (0, 10)}, new_rows=(new_row(),))
    with pytest.raises(PlanError, match=message):
        step(worker, spans, **parts)


def test_many_rows_at_once(worker: ModelWorker) -> None:
    expected = answer(worker, 0, 1)
    rows = range(1, 41)
    result = step(worker, dict.fromkeys(rows, (8, 2)), new_rows=tuple(new_row(row) for row in rows))
    assert result.tokens == tuple(expected * 40)
    step(worker, {}, freed_rows=tuple(rows))
    assert len(runner_of(worker).rows) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_run_close_to_float32(folder: Path, dtype: str) -> None:
    worker, ready, _ = load(folder, dtype=dtype)
    assert ready.dtype == dtype
    state = SamplingState(temperature=0.0, prompt_logprobs=0)
    described = step(worker, {0: (0, 10)}, new_rows=(new_row(sampling=state),)).prompt_logprobs[0]
    full = step(load(folder)[0], {0: (0, 10)}, new_rows=(new_row(sampling=state),)).prompt_logprobs[0]
    values, expected = (np.frombuffer(part.logprobs, "<f4") for part in (described, full))
    np.testing.assert_allclose(values, expected, atol=0.5)
    assert len(step(worker, {0: (10, 1)}).tokens) == 1


def test_dummy_weights_need_only_a_config(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    first = answer(load(tmp_path, load_format="dummy")[0], 0, 2)
    assert answer(load(tmp_path, load_format="dummy")[0], 0, 2) == first
    with pytest.raises(ModelLoadError, match="model.safetensors is missing"):
        load(tmp_path)


def test_a_closed_worker_restores_the_number_of_threads(folder: Path) -> None:
    before = torch.get_num_threads()
    worker, _, _ = load(folder, num_threads=before + 1)
    assert torch.get_num_threads() == before + 1
    worker.close()
    assert torch.get_num_threads() == before


def test_threads_are_restored_in_whatever_order_engines_end(folder: Path) -> None:
    before = torch.get_num_threads()
    first, second, third = (load(folder, num_threads=before + number)[0] for number in (1, 2, 3))
    second.close()
    first.close()
    assert torch.get_num_threads() == before + 3
    third.close()
    assert torch.get_num_threads() == before


def test_a_device_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, device="cuda")
    assert caught.value.param == "device"


@pytest.mark.parametrize("backend", ["torch", "sdpa", "reference"])
def test_attention_by_another_back_end_gives_the_same_tokens(folder: Path, worker: ModelWorker, backend: str) -> None:
    forced, _, progress = load(folder, attention_backend=backend)
    assert progress[-1].detail == f"attention: {backend}"
    assert answer(forced, 0, 3) == answer(worker, 0, 3)


def test_attention_that_cannot_is_refused_at_load(folder: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend flex is compiled for GPUs only"):
        load(folder, attention_backend="flex")


def test_batch_invariance_reaches_the_weights(folder: Path) -> None:
    invariant, _, _ = load(folder, batch_invariant=True)
    made = runner_of(invariant)
    assert isinstance(made, runner.ModelRunner)
    assert made.decoder.batch_invariant
    assert made.decoder.layers[0].attention.qkv.invariant
    plain, _, _ = load(folder)
    assert not runner_of(plain).decoder.batch_invariant
    assert answer(invariant, 0, 3) == answer(plain, 0, 3)
