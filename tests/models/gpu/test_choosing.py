"""Rows with penalties and log-probabilities: no step waits for them, and they get the results of the CPU's runner."""

from typing import Any

import numpy as np
import pytest
import torch

from troupellm.kernels.sampling.adjust import penalize, tally, unpacked
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.gpu.device import CpuDevice
from troupellm.models.gpu.logprobs import NOTHING
from troupellm.models.gpu.penalties import PenaltyTensors, penalize_rows
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.gpu.sampling_tensors import ELSEWHERE, SamplingTensors, kind_of
from troupellm.models.sampling.row_options import RowOptions
from troupellm.protocol.messages.worker import RowChange, SamplingState, StepPlan
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt
from troupellm.tests.support.gpu.device_runner import BLOCK_SIZE, NUM_BLOCKS, check, device_runner, replay
from troupellm.tests.support.gpu.pretended_gpu import LateEvent
from troupellm.tests.support.gpu.tensor_attention import plan_tensors
from troupellm.tests.support.workers.plan_script import Script, plain

LOOKING_BACK: dict[int, dict[str, Any]] = {
    0: {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    1: {},
    2: {"temperature": 0.8, "seed": 3, "logprobs": 0},
    3: {"temperature": 1.1, "seed": 4, "top_k": 20, "top_p": 0.8, "repetition_penalty": 0.7, "logprobs": 0},
    4: {"temperature": 1.3, "seed": 5, "min_p": 0.02, "presence_penalty": 1.5},
    5: {"logprobs": 0},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("llama"), FAMILIES["llama"]())


def script(pair: Pair) -> Script:
    return Script(pair.runner(NUM_BLOCKS, BLOCK_SIZE), NUM_BLOCKS)


@pytest.mark.parametrize("sizes", [(), (4, 8)], ids=["eager", "graphs"])
def test_rows_that_look_back_get_what_they_get_on_a_cpu(llama: Pair, sizes: tuple[int, ...]) -> None:
    told = script(llama)
    for row, sampling in LOOKING_BACK.items():
        told.add(row, make_prompt(6 + row, row), **sampling)
    told.step(dict.fromkeys(LOOKING_BACK, 3))
    told.step({row: 3 + row for row in LOOKING_BACK})
    told.decode(*LOOKING_BACK, steps=8)
    told.step(dict.fromkeys(LOOKING_BACK, 1), changes=(RowChange(row=1, sampling=SamplingState(seed=5)),))
    said = told.known[0]
    told.add(0, said.tokens, known=said.prompt, **LOOKING_BACK[0])  # preempted: its prompt is no longer than it was
    told.step({0: len(said.tokens), 1: 1, 2: 1})
    told.decode(*LOOKING_BACK, steps=3)
    runner = device_runner(llama, sizes)
    check(replay(runner, told.plans), told.results)
    assert sum(len(result.logprobs) for result in told.results) > 20


def test_rows_that_look_back_are_launched_without_a_wait(llama: Pair) -> None:
    told = script(llama)
    for row, sampling in LOOKING_BACK.items():
        told.add(row, make_prompt(6 + row, row), **sampling)
    told.step({row: 6 + row for row in LOOKING_BACK})
    told.decode(*LOOKING_BACK, steps=5)
    runner = device_runner(llama, (8,))
    for plan, expected in zip(told.plans, told.results, strict=True):
        with torch.inference_mode():
            ticket = runner.launch(plan)
        assert ticket.result is None
        check([plain(runner.collect(ticket))], [expected])


def test_a_row_with_penalties_whose_logits_are_no_numbers_fails_alone(llama: Pair) -> None:
    """A penalty would make a finite number of an infinite one."""
    logits = torch.zeros(3, 40)
    logits[1, 5], logits[2, 6] = torch.inf, torch.nan
    columns = PenaltyTensors()
    for slot in range(3):
        columns.put(slot, options(repetition_penalty=1.5))
    there = torch.from_numpy(columns.of(np.arange(3), np.array([8, 8, 8])))
    sound = penalize_rows(logits, there, torch.full((3, 9), 5, dtype=torch.int32), 8)
    assert sound.tolist() == [True, False, False]
    told = script(llama)
    for row in range(3):
        told.add(row, make_prompt(6, row), repetition_penalty=1.2, logprobs=0)
    told.step({0: 6, 1: 6, 2: 6})
    told.decode(0, 1, 2, steps=3)
    runner = device_runner(llama, (4,))
    replay(runner, told.plans[:-1])
    runner.cache.storage[:, :, runner.rows.tables(1)[0][0]] = float("nan")
    result = runner.run(told.plans[-1])
    assert [error.row for error in result.errors] == [1]
    assert result.token_counts == (1, 0, 1)
    assert [entry.row for entry in result.logprobs] == [0, 2]


LISTED: dict[int, dict[str, Any]] = {
    0: {"logprobs": 3},
    1: {"logit_bias": ((7, 50.0), (9, -2.0)), "logprobs": 0},
    2: {"allowed_token_ids": (4, 5, 6, 7), "temperature": 1.0, "seed": 3, "logprobs": 5},
    3: {"min_tokens": 4, "stop_token_ids": tuple(range(150)), "bad_words": ((151,),), "logprobs": 3},
    4: {"repetition_penalty": 1.4, "logit_bias": ((20, 3.0),), "top_k": 9, "temperature": 0.8, "seed": 2},
    5: {"logprobs": 400},
}


@pytest.mark.parametrize("sizes", [(), (1, 2, 8)], ids=["eager", "graphs"])
@pytest.mark.parametrize("rows", [(0,), (1,), (2, 3), (4, 0), (5, 1), tuple(LISTED)], ids=str)
def test_listed_tokens_and_likeliest_ones_are_no_reason_to_wait(
    llama: Pair, rows: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    told = script(llama)
    for row in rows:
        told.add(row, make_prompt(5, row), **LISTED[row])
    told.step(dict.fromkeys(rows, 5))
    told.decode(*rows, steps=7)
    check(replay(device_runner(llama, sizes), told.plans), told.results)
    runner = device_runner(llama, sizes)
    for plan in told.plans[:2]:
        assert runner.launch(plan).result is None


def test_rows_that_may_say_nothing_fail_alone(llama: Pair) -> None:
    told = script(llama)
    vocab = llama.config.vocab_size
    told.add(0, make_prompt(5), logprobs=2)
    told.add(1, make_prompt(5, 1), allowed_token_ids=(3,), min_tokens=9, stop_token_ids=(3,), logprobs=2)
    told.add(2, make_prompt(5, 2), logit_bias=tuple((token, -1.0) for token in range(vocab)))
    told.step({0: 5, 1: 5, 2: 5})
    assert [error.row for error in told.results[0].errors] == [1]
    assert told.results[0].errors[0].message.startswith("no token is left")
    check(replay(device_runner(llama), told.plans), told.results)


def options(**state: Any) -> RowOptions:
    return RowOptions(SamplingState(**state), torch.arange(4), 40)


@pytest.mark.parametrize(
    "state",
    [
        {"logprobs": 1, "logprobs_mode": "processed_logprobs"},
        {"logprobs": 0, "logprobs_mode": "raw_logits"},
        {"logprobs": 0, "logprob_token_ids": (3,)},
        {"bad_words": ((3, 4),)},
    ],
)
def test_what_more_is_asked_about_tokens_is_computed_elsewhere(state: dict[str, Any]) -> None:
    assert kind_of(options(**state)) == ELSEWHERE
    columns = SamplingTensors()
    columns.put(0, options(**state))
    assert columns.num_logprobs[0] == NOTHING


def test_what_is_said_is_counted() -> None:
    texts = torch.tensor([[9, 9, 9, 9, 9, 9], [3, 34, 3, 7, 7, 31], [33, 500, -1, 33, 2, 2]], dtype=torch.int32)
    slots, skips, prompts, ends = (torch.tensor(part) for part in ([1, 2], [0, 2], [3, 2], [6, 5]))
    counts, seen = tally(texts, slots, skips, prompts, ends, vocab=35, longest=6)
    assert counts.dtype == seen.dtype == torch.int32
    times = [{token: count for token, count in enumerate(row) if count} for row in counts.tolist()]
    assert times == [{7: 2, 31: 1}, {0: 1, 2: 1, 33: 1}]
    assert unpacked(seen, 35)[0].nonzero().flatten().tolist() == [3, 34]
    assert not seen[1].any()


def test_columns_hold_what_penalties_are_told() -> None:
    columns = PenaltyTensors()
    columns.put(20, options(presence_penalty=0.5))
    columns.put(3, options())
    embedded = RowOptions(SamplingState(repetition_penalty=0.0), torch.zeros(7, dtype=torch.int32), 40, known=False)
    columns.put(4, embedded)
    assert columns.among(np.array([3, 4]))
    assert not columns.among(np.array([3]))
    found = columns.of(np.array([4, 3, 20]), np.array([9, 8, 7]))
    assert found[:5].tolist() == [[0, 2], [4, 20], [9, 7], [7, 0], [7, 4]]
    factors = np.ascontiguousarray(found[5:].T).view(np.float32)
    assert factors.tolist() == [[float(np.float32(1.2e-38)), 0.0, 0.0, 0.0], [1.0, 0.0, 0.5, 0.0]]
    columns.put(20, options())
    assert not columns.among(np.array([20]))


def test_penalties_of_a_step_are_those_of_each_row() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, columns = torch.randn(3, 40, generator=generator), PenaltyTensors()
    for slot in range(3):
        columns.put(slot, options(repetition_penalty=1.5, frequency_penalty=0.25 * (slot == 2)))
    columns.put(1, options())
    texts = torch.randint(0, 40, (3, 10), generator=generator).int()
    wanted = logits.clone()
    for row, end in ((0, 6), (2, 9)):
        slots, ends = torch.tensor([row]), torch.tensor([end])
        counts, seen = tally(texts, slots, torch.tensor([0]), torch.tensor([4]), ends, vocab=40, longest=9)
        penalize(wanted, slots, counts, seen, torch.tensor([1.5]), torch.tensor([0.25 * (row == 2)]), torch.zeros(1))
    there = torch.from_numpy(columns.of(np.arange(3), np.array([6, 7, 9])))
    assert penalize_rows(logits, there, texts, 9).all()
    assert torch.equal(logits, wanted)


class WatchedDevice(CpuDevice):
    """Tells who waits for what."""

    def __init__(self) -> None:
        self.recorded: list[LateEvent] = []

    def record(self) -> LateEvent:
        self.recorded.append(LateEvent())
        return self.recorded[-1]


def test_a_step_of_which_nothing_comes_back_is_waited_for_as_well(llama: Pair) -> None:
    """Its blocks, and the memory that it is read from, are another's once it is collected."""
    told = script(llama)
    told.add(0, make_prompt(40))
    told.step({0: 13})
    told.step({0: 13})
    cache, device = KVCache(llama.config, NUM_BLOCKS + 1, BLOCK_SIZE, torch.float32), WatchedDevice()
    runner = CudaRunner(llama.decoder, cache, device, max_model_len=MAX_LEN, plan=plan_tensors)
    empty = StepPlan(step=2, engine_epoch=0, rows=(), epochs=(), starts=(), counts=(), freed_rows=(0,))
    for plan in (*told.plans, empty):
        ticket = runner.launch(plan)
        behind = device.recorded[-1]
        assert not behind.happened
        runner.collect(ticket)
        assert behind.happened
    assert len(device.recorded) == 3
