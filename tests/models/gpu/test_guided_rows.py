"""Guided rows on a device: their layers run before their masks are known, and they say what they say on a CPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.structured_outputs.backends import program_text
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.guide import GuideProgram, GuideSpec
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.inside import guided_rows_of
from troupellm.tests.support.gpu.device_runner import BLOCK_SIZE, NUM_BLOCKS, check, device_runner, replay
from troupellm.tests.support.workers.plan_script import Script, plain

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, llama: Pair) -> GuideLibrary:
    tokenizer = Tokenizer.load(write_tiny_model(tmp_path_factory.mktemp("tokenizer")))
    return GuideLibrary(lambda: tokenizer, llama.config.vocab_size, 1)


@pytest.fixture
def helper() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def told(llama: Pair, library: GuideLibrary, helper: ThreadPoolExecutor) -> Script:
    """By the CPU's runner."""
    return Script(llama.runner(NUM_BLOCKS, BLOCK_SIZE, guides=GuidedRows(library, helper)), NUM_BLOCKS)


@pytest.fixture(params=[(), SIZES], ids=["eager", "graphs"])
def runner(
    request: pytest.FixtureRequest, llama: Pair, library: GuideLibrary, helper: ThreadPoolExecutor
) -> CudaRunner:
    return device_runner(llama, request.param, guides=GuidedRows(library, helper))


def guide(pattern: str) -> dict[str, Any]:
    spec = GuideSpec(kind="regex", source=pattern)
    return {"guide": GuideProgram(backend="llguidance", text=program_text(spec, "llguidance", 64, {}))}


def one_each(told: Script, *rows: int, steps: int = 1, **more: Any) -> None:
    """Steps that are planned before anybody has seen what a guide forced upon rows in the last one."""
    for _ in range(steps):
        told.step(dict.fromkeys(rows, 1), **more)


def test_layers_run_while_the_step_before_is_under_way(told: Script, runner: CudaRunner) -> None:
    told.add(0, make_prompt(6), **guide("[a-z]{5}[0-9]{30}"))
    told.step({0: 6})
    one_each(told, 0, steps=3)
    tickets = [runner.launch(plan) for plan in told.plans[:2]]
    assert [ticket.choice is None for ticket in tickets] == [True, False]
    assert tickets[1].done is None
    assert plain(runner.collect(tickets[0])) == told.results[0]
    assert tickets[1].choice is not None  # the result is not kept back for it
    runner.flights.complete()
    assert tickets[1].choice is None
    tickets.append(runner.launch(told.plans[2]))
    assert tickets[2].result is None
    assert [plain(runner.collect(ticket)) for ticket in tickets[1:]] == told.results[1:3]


OPTIONS: dict[int, dict[str, Any]] = {
    0: guide("[a-z]{5,9}[0-9]{3,40}"),
    1: {},
    2: {"temperature": 0.9, "seed": 5, **guide("([a-f]|[0-9]){60}")},
    3: {"temperature": 1.1, "seed": 6, "top_k": 9, "logprobs": 0, **guide("[A-Za-z ]{60}")},
    4: {"repetition_penalty": 1.5, "presence_penalty": 0.5, **guide("[a-z]{60}")},
    5: {"temperature": 0.7, "seed": 7, "frequency_penalty": 0.4, "logprobs": 0},
    6: guide("(one|two|three) and a very long sentence that can only go on like this[.!]"),
}


@pytest.mark.parametrize("rows", [(0,), (0, 2), (1, 3), (4, 5), (0, 1, 2, 3), (6,), tuple(OPTIONS)], ids=str)
def test_rows_say_what_they_say_on_a_cpu(told: Script, runner: CudaRunner, rows: tuple[int, ...]) -> None:
    for row in rows:
        told.add(row, make_prompt(6 + row, row), **OPTIONS[row])
    told.step(dict.fromkeys(rows, 3))
    told.step({row: 3 + row for row in rows})
    one_each(told, *rows, steps=12)
    check(replay(runner, told.plans), told.results)


def test_forced_tokens_are_known_a_step_late(told: Script, runner: CudaRunner) -> None:
    forced = guide("[xyz]abcdefghabcdefgh[xyz]{40}")
    told.add(0, make_prompt(7), **forced)
    told.add(1, make_prompt(9, 1), logprobs=0)
    told.add(2, make_prompt(8, 2), logprobs=0, **guide("[a-z]{60}"))
    told.step({0: 7, 1: 9, 2: 8})
    assert told.results[0].token_counts[0] > 8
    one_each(told, 0, 1, 2)
    assert told.results[1].token_counts == (0, 1, 1)
    told.decode(0, 1, 2, steps=4)
    check(replay(runner, told.plans), told.results)


def test_complete_grammars_and_numbers_that_are_taken_again(told: Script, runner: CudaRunner) -> None:
    told.add(0, make_prompt(6), **guide("[a-z]{3}"))
    told.add(1, make_prompt(7, 1), **guide("[0-9]{20}"))
    told.step({0: 6, 1: 7})
    one_each(told, 0, 1, steps=3)
    assert any(0 in result.finished for result in told.results)
    told.add(0, make_prompt(5, 3), **guide("[A-Z]{20}"))
    told.step({1: 1, 0: 5}, freed_rows=(0,))
    one_each(told, 1, 0, steps=3)
    told.step({0: 1}, freed_rows=(1,))
    told.add(1, make_prompt(4, 4))
    told.step({0: 1, 1: 4})
    one_each(told, 0, 1, steps=3)
    told.add(1, make_prompt(6, 5), **guide("[xyz]abcdefgh[A-Z]{20}"))  # which had none before
    told.step({0: 1, 1: 6}, freed_rows=(1,))
    one_each(told, 0, 1, steps=3)
    check(replay(runner, told.plans), told.results)


def test_a_row_that_ends_keeps_no_other_waiting(told: Script, runner: CudaRunner) -> None:
    for row in range(2):
        told.add(row, make_prompt(6, row), **guide("[a-z]{60}"))
    told.step({0: 6, 1: 6})
    one_each(told, 0, 1)
    told.step({1: 1}, freed_rows=(0,))
    one_each(told, 1)
    first, second = runner.launch(told.plans[0]), runner.launch(told.plans[1])
    assert plain(runner.collect(first)) == told.results[0]
    third = runner.launch(told.plans[2])
    assert second.result is None
    assert [plain(runner.collect(ticket)) for ticket in (second, third)] == told.results[1:3]


def test_beside_rows_that_the_host_looks_into(told: Script, runner: CudaRunner) -> None:
    told.add(0, make_prompt(6), **guide("[xyz]abcdefghabcdefgh[a-z]{40}"))
    told.add(1, make_prompt(7, 1), **guide("[a-z]{60}"))
    told.step({0: 6, 1: 7})
    one_each(told, 0, 1)
    told.add(2, make_prompt(5, 2), logit_bias=((7, 5.0),), logprobs=2)
    told.step({0: 1, 1: 1, 2: 5})
    one_each(told, 0, 1, 2, steps=2)
    told.step({0: 1, 1: 1}, freed_rows=(2,))
    told.add(3, make_prompt(9, 3), prompt_logprobs=1)
    told.step({0: 1, 1: 1, 3: 9})
    told.decode(0, 1, 3, steps=3)
    check(replay(runner, told.plans), told.results)


def test_a_guide_that_breaks_fails_its_row_alone(told: Script, runner: CudaRunner) -> None:
    told.add(0, make_prompt(6), **guide("[a-z]{60}"))
    told.add(1, make_prompt(7, 1), **guide("[0-9]{60}"))
    told.step({0: 6, 1: 7})
    one_each(told, 0, 1, steps=2)
    broken(told.runner)
    one_each(told, 0, 1)
    assert [error.row for error in told.results[-1].errors] == [0]
    got = replay(runner, told.plans[:-1])
    broken(runner)
    check([*got, plain(runner.run(told.plans[-1]))], told.results)


def broken(runner: ModelRunner) -> None:
    """The first row's guide finds no token any more."""
    assert runner.guides is not None
    guided_rows_of(runner.guides)[0].error = "broken"


def test_logits_that_are_no_numbers_are_not_blamed_on_a_guide(told: Script, runner: CudaRunner) -> None:
    for row in range(2):
        told.add(row, make_prompt(6, row), **guide("[a-z]{60}"))
    told.step({0: 6, 1: 6})
    one_each(told, 0, 1, steps=2)
    replay(runner, told.plans[:-1])
    runner.cache.storage[:, :, runner.rows.tables(1)[0][0]] = float("nan")
    result = runner.run(told.plans[-1])
    assert [error.message for error in result.errors] == ["the model gave NaN or infinite logits for this sequence"]
    assert result.token_counts == (1, 0)
    assert result.tokens == told.results[-1].tokens[:1]
