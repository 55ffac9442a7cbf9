"""The device's runner, with a CPU as its device, gives what the CPU's runner gives: plan for plan, token for token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from troupellm.models.batch.row_drafts import DraftError, Drafts
from troupellm.models.batch.row_table import PlanError
from troupellm.models.gpu.graph_dispatch import GraphKey
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.proposers.base import ProposalBatch
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.speculation.speculator import MakeSpeculator, Speculator
from troupellm.protocol.messages.worker import NewRow, RowChange, SamplingState, StepPlan
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt
from troupellm.tests.support.gpu.device_runner import BLOCK_SIZE, NUM_BLOCKS, check, device_runner, replay, script
from troupellm.tests.support.speculation.scripted_drafts import ScriptedProposer, SpeculativeHost
from troupellm.tests.support.workers.plan_script import Script, plain


def mixed(script: Script) -> None:
    """Chunked prompts beside rows that decode, rows that leave, numbers that are taken again, a preemption."""
    script.add(0, make_prompt(21))
    script.step({0: 13})
    script.add(1, make_prompt(5, 1))
    script.step({0: 8, 1: 5})
    script.decode(0, 1, steps=3)
    script.add(2, make_prompt(40, 2))
    script.step({0: 1, 2: 17, 1: 1})
    script.step({2: 1})
    script.step({2: 22, 0: 1})
    script.decode(2, 0, 1, steps=2)
    script.step({0: 1, 2: 1}, freed_rows=(1,))
    script.add(1, make_prompt(9, 4))
    script.step({1: 9, 0: 1, 2: 1})
    script.decode(1, 2, steps=9)
    told = script.known[0]
    script.add(0, told.tokens, known=told.prompt)  # preempted, and told anew
    script.step({0: 20, 1: 1})
    script.step({0: len(told.tokens) - 20, 2: 1})
    script.decode(0, 1, 2, steps=4)


@pytest.mark.parametrize("sizes", [(), (1, 2, 4), (2, 8)], ids=["eager", "graphs", "padded"])
def test_mixed_plans_give_the_tokens_of_a_cpu(llama: Pair, sizes: tuple[int, ...]) -> None:
    told = script(llama)
    mixed(told)
    check(replay(device_runner(llama, sizes), told.plans), told.results)


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        "gemma4_shared",
        "qwen2_tied_window",
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("deepseek_v2", marks=pytest.mark.slow),
    ],
)
def test_windows_soft_caps_sinks_experts_and_latent_vectors(tmp_path: Path, family: str) -> None:
    pair = Pair(tmp_path, FAMILIES[family]())
    told = script(pair)
    mixed(told)
    got = replay(device_runner(pair), told.plans)
    assert [result.tokens for result in got] == [result.tokens for result in told.results]


OPTIONS: dict[int, dict[str, Any]] = {
    0: {"temperature": 0.7, "seed": 11},
    1: {},
    2: {"temperature": 1.3, "seed": 12, "min_p": 0.05},
    3: {"temperature": 0.9, "seed": 13, "fork": 2},
}
CUTTING: dict[int, dict[str, Any]] = {
    4: {"temperature": 1.0, "seed": 14, "top_k": 7},
    5: {"temperature": 1.1, "seed": 15, "top_p": 0.6},
    6: {"temperature": 1.1, "seed": 15, "top_k": 200, "top_p": 0.9, "min_p": 0.01},
}
DEMANDING: dict[int, dict[str, Any]] = {
    7: {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    8: {"temperature": 0.8, "seed": 3, "logprobs": 3, "prompt_logprobs": 2},
    9: {"logit_bias": ((7, 5.0),), "bad_words": ((4,), (9, 8)), "min_tokens": 4, "stop_token_ids": (5, 6)},
    10: {"temperature": 0.5, "allowed_token_ids": (4, 5, 6, 7), "logprobs": 0, "logprobs_mode": "processed_logprobs"},
}


@pytest.mark.parametrize("sizes", [(), (4, 8, 16)], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "options", [OPTIONS, {**OPTIONS, **CUTTING}, {**CUTTING, **DEMANDING, 0: OPTIONS[0], 1: {}}],
    ids=["drawn", "cut", "demanding"],
)  # fmt: skip
def test_sampled_tokens_are_those_of_a_cpu(
    llama: Pair, options: dict[int, dict[str, Any]], sizes: tuple[int, ...]
) -> None:
    told = script(llama)
    for row, sampling in options.items():
        told.add(row, make_prompt(6 + row, row), **sampling)
    told.step(dict.fromkeys(options, 3))
    told.step({row: 3 + row for row in options})
    told.decode(*options, steps=6)
    told.step(dict.fromkeys(options, 1), changes=(RowChange(row=1, sampling=SamplingState(seed=5)),))
    told.decode(*list(options)[:3], steps=3)
    check(replay(device_runner(llama, sizes), told.plans), told.results)


def test_a_demanding_row_that_leaves_lets_the_others_go_ahead_again(llama: Pair) -> None:
    told = script(llama)
    told.add(0, make_prompt(6))
    told.add(1, make_prompt(7), logit_bias=((7, 5.0),))
    told.step({0: 6, 1: 7})
    told.decode(0, 1, steps=2)
    told.step({0: 1}, freed_rows=(1,))
    told.decode(0, steps=3)
    runner = device_runner(llama)
    check(replay(runner, told.plans), told.results)
    with torch.inference_mode():
        assert runner.launch(told_next(told, 0)).result is None  # not waited for


def told_next(told: Script, row: int) -> StepPlan:
    """One more token of a row that has room for it."""
    known = told.known[row]
    assert known.done < known.held * BLOCK_SIZE
    return StepPlan(step=99, engine_epoch=0, rows=(row,), epochs=(known.epoch,), starts=(known.done,), counts=(1,))


def test_beams_fork_and_copy(llama: Pair) -> None:
    told = script(llama)
    for row in (0, 1):
        told.add(row, make_prompt(11), logprobs=4)
    told.step({0: 11, 1: 11})
    told.decode(0, 1, steps=2)
    length = told.known[0].done
    first, second = told.fork(0, 1, length, 7), told.fork(1, 1, length, 9)
    copies = tuple(copy for copy in (first[1], second[1]) if copy is not None)
    assert len(copies) == 2
    told.step({0: 1, 1: 1}, forks=(first[0], second[0]), changes=(first[2], second[2]), copies=copies)
    told.decode(0, 1, steps=4)
    check(replay(device_runner(llama), told.plans), told.results)


def test_a_new_row_has_nothing_of_what_its_slot_was_told_last(llama: Pair) -> None:
    runner = device_runner(llama)
    told = script(llama)
    told.add(0, make_prompt(6))
    told.step({0: 6})
    replay(runner, told.plans)
    runner.rows.append_known(0, [9, 9, 9])
    runner.rows.drop(0)
    runner.rows.add(
        NewRow(
            row=1,
            epoch=1,
            request_id="1",
            token_ids=np.arange(20, dtype="<i4").tobytes(),
            num_prompt_tokens=20,
            sampling=SamplingState(),
            blocks=((),),
        )
    )
    places, values = runner.rows.changes()[2:]
    assert values.tolist() == list(range(20))
    assert np.unique(places).size == places.size == 20


def test_more_rows_than_there_were_slots_for(llama: Pair) -> None:
    told = script(llama)
    for row in range(5):
        told.add(row, make_prompt(4 + row))
        told.step({row: 4 + row})
        told.decode(*range(row + 1), steps=3)
    runner = device_runner(llama, (1, 2, 4, 8), slots=2)
    check(replay(runner, told.plans), told.results)
    assert runner.rows.generation == 3


def test_a_row_whose_logits_are_no_numbers_fails_alone(llama: Pair) -> None:
    runner = device_runner(llama, (4,))
    told = script(llama)
    for row in range(3):
        told.add(row, make_prompt(6, row))
    told.step({0: 6, 1: 6, 2: 6})
    told.decode(0, 1, 2, steps=3)
    replay(runner, told.plans[:-1])
    block = runner.rows.tables(1)[0][0]
    runner.cache.storage[:, :, block] = float("nan")
    result = runner.run(told.plans[-1])
    assert [(error.row, error.message) for error in result.errors] == [
        (1, "the model gave NaN or infinite logits for this sequence")
    ]
    assert result.token_counts == (1, 0, 1)
    expected = told.results[-1].tokens
    assert result.tokens == (expected[0], expected[2])
    after = StepPlan(step=9, engine_epoch=0, rows=(1,), epochs=(1,), starts=(9,), counts=(1,))
    assert runner.run(after).token_counts == (0,)  # it was planned before anybody knew


def test_a_third_plan_and_tickets_out_of_order_are_refused(llama: Pair) -> None:
    told = script(llama)
    told.add(0, make_prompt(8))
    told.step({0: 8})
    told.decode(0, steps=2)
    runner = device_runner(llama)
    first, second = runner.launch(told.plans[0]), runner.launch(told.plans[1])
    with pytest.raises(RuntimeError, match="2 plans are under way"):
        runner.launch(told.plans[2])
    with pytest.raises(RuntimeError, match="in the order"):
        runner.collect(second)
    assert plain(runner.collect(first)) == told.results[0]
    assert plain(runner.collect(second)) == told.results[1]


def test_no_row_has_the_null_page(llama: Pair) -> None:
    row = NewRow(
        row=0,
        epoch=1,
        request_id="0",
        token_ids=b"\1\0\0\0",
        num_prompt_tokens=1,
        sampling=SamplingState(),
        blocks=((NUM_BLOCKS,),),
    )
    plan = StepPlan(step=0, engine_epoch=0, rows=(0,), epochs=(1,), starts=(0,), counts=(1,), new_rows=(row,))
    with pytest.raises(PlanError, match=f"block {NUM_BLOCKS} of {NUM_BLOCKS} was named"):
        device_runner(llama).launch(plan)


@pytest.mark.parametrize(("right", "sizes"), [(0.0, (1, 2, 4)), (0.8, (1, 2, 4)), (0.8, ())])
def test_rows_with_drafts_say_what_they_say_without(llama: Pair, right: float, sizes: tuple[int, ...]) -> None:
    options: list[dict[str, Any]] = [
        {}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}, {"repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.8, "seed": 4, "presence_penalty": 1.0},
    ]  # fmt: skip
    prompts = [make_prompt(5 + 9 * row, row) for row in range(4)]

    def host(runner: ModelRunner, limit: int) -> SpeculativeHost:
        found = SpeculativeHost(runner, limit)
        for row, prompt in enumerate(prompts):
            found.add(row, prompt, **options[row])
        found.run(20, chunk=7)
        return found

    vocab = llama.config.vocab_size
    alone = host(llama.runner(NUM_BLOCKS, BLOCK_SIZE, speculation=speculation(ScriptedProposer({}, vocab), vocab)), 0)
    truth = {
        (tuple(prompts[row]), options[row].get("seed", 0), 0): alone.tokens[row][len(prompts[row]) :]
        for row in range(4)
    }
    proposer = ScriptedProposer(truth, vocab, right=right, aux_hidden_states=AuxHiddenStates(last=True))
    runner = device_runner(llama, sizes, speculation=speculation(proposer, vocab, most=5))
    replayed = []
    verify = runner.graphs.verify
    runner.graphs.verify = lambda key: replayed.append(key) or verify(key)  # type: ignore[method-assign]
    drafted = host(runner, 5)
    for row, prompt in enumerate(prompts):
        end = len(prompt) + 20
        assert drafted.tokens[row][:end] == alone.tokens[row][:end]
        assert sum(count for _, count in proposer.observed[runner.rows.slot(row)]) == len(drafted.tokens[row]) - 1
    assert drafted.drafted > 50
    assert (drafted.accepted > 0) == (right > 0)
    assert (replayed.count(GraphKey(4, 6)) > 3) == bool(sizes)
    written = runner.cache.storage.isnan().flatten(3).logical_not().any(-1).any(0).any(0).nonzero()
    pads = {NUM_BLOCKS} if sizes else set()
    assert set(written.flatten().tolist()) - runner.rows.held_blocks() == pads
    growing = ScriptedProposer(truth, vocab, right=right, branches=2, aux_hidden_states=AuxHiddenStates(last=True))
    grown = host(device_runner(llama, sizes, speculation=speculation(growing, vocab)), 5)
    for row, prompt in enumerate(prompts):
        assert grown.tokens[row][: len(prompt) + 20] == alone.tokens[row][: len(prompt) + 20]
    assert (grown.accepted > 0) == (right > 0)
    with pytest.raises(DraftError, match="chains"):
        host(device_runner(llama, speculation=speculation(growing, vocab, trees=False)), 5)


@pytest.mark.parametrize("family", ["gemma2", pytest.param("deepseek_v2", marks=pytest.mark.slow)])
def test_rows_of_a_window_with_as_many_drafts_each(tmp_path: Path, family: str) -> None:
    pair, prompts = Pair(tmp_path, FAMILIES[family]()), [make_prompt(5 + 9 * row, row) for row in range(3)]
    vocab, texts = pair.config.vocab_size, []
    runner: ModelRunner
    for on_device in (False, True):
        given = speculation(Steady({}, vocab, aux_hidden_states=AuxHiddenStates(layers=(0,))), vocab, most=3)
        if on_device:
            runner = device_runner(pair, (4,), speculation=given)
        else:
            runner = pair.runner(NUM_BLOCKS, BLOCK_SIZE, speculation=given)
        told = SpeculativeHost(runner, 3)
        for row, prompt in enumerate(prompts):
            told.add(row, prompt)
        told.run(16)
        texts.append({row: told.tokens[row][: len(prompts[row]) + 16] for row in told.tokens})
    assert texts[0] == texts[1]
    assert isinstance(runner, CudaRunner)
    assert runner.graphs.dispatcher.stand_in(GraphKey(4, 4)) == GraphKey(4, 4)


def test_trees_through_a_window(tmp_path: Path) -> None:
    pair = Pair(tmp_path, FAMILIES["gemma2"]())
    vocab, texts = pair.config.vocab_size, []
    for runner in (
        pair.runner(NUM_BLOCKS, BLOCK_SIZE, speculation=speculation(ScriptedProposer({}, vocab), vocab)),
        device_runner(pair, speculation=speculation(ScriptedProposer({}, vocab, branches=2), vocab)),
    ):
        told = SpeculativeHost(runner, 5 * (len(texts) > 0))
        for row in range(3):
            told.add(row, make_prompt(5 + 9 * row, row))
        told.run(20)
        texts.append([told.tokens[row][: 25 + 9 * row] for row in range(3)])
    assert told.drafted > 30
    assert texts[0] == texts[1]


class Steady(ScriptedProposer):
    """Always as many as are wanted, of nothing that it knows."""

    def propose(self, batch: ProposalBatch) -> Drafts:
        shape = (batch.slots.size, int(batch.limits.max()))
        return Drafts(np.random.default_rng(3).integers(0, self._vocab, shape).astype(np.int32), batch.limits)


def speculation(proposer: ScriptedProposer, vocab: int, most: int = 5, *, trees: bool = True) -> MakeSpeculator:
    return lambda rows, options, guides: Speculator(
        proposer, rows, options, vocab, most=most, guides=guides, trees=trees
    )
