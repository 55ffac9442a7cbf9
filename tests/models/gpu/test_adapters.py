"""The device's runner with adapters gives what the CPU's runner gives, by graphs of their own and without."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from troupellm.models.gpu.graph_dispatch import GraphKey
from troupellm.models.speculation.speculator import Speculator
from troupellm.tests.support.adapters.adapted_runner import Adapters
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt
from troupellm.tests.support.gpu.device_runner import BLOCK_SIZE, NUM_BLOCKS, check, device_runner, replay
from troupellm.tests.support.speculation.scripted_drafts import ScriptedProposer, SpeculativeHost
from troupellm.tests.support.workers.plan_script import Script


@pytest.mark.parametrize("sizes", [(), (1, 2, 4)], ids=["eager", "graphs"])
def test_mixed_plans_give_the_tokens_of_a_cpu(llama: Pair, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    adapters = Adapters(tmp_path, llama.config)
    script = Script(llama.runner(NUM_BLOCKS, BLOCK_SIZE, adapters=adapters.slots()), NUM_BLOCKS)
    script.add(0, make_prompt(21), logprobs=2)
    script.add(1, make_prompt(9, 1), adapter=1)
    script.step({0: 13, 1: 9}, adapters=adapters.changes("all"))
    script.add(2, make_prompt(12, 2), adapter=2, logprobs=1, prompt_logprobs=1)
    script.step({1: 1, 0: 8, 2: 12}, adapters=adapters.changes("all", "head")[1:])
    script.decode(0, 1, 2, steps=3)
    script.decode(0, steps=3)
    script.step({2: 1}, freed_rows=(1,))
    script.add(1, make_prompt(5, 3), adapter=1)
    script.step({0: 1, 1: 5}, adapters=adapters.changes("biases"))
    script.decode(2, 1, 0, steps=4)
    made = device_runner(llama, sizes, adapters=adapters.slots())
    check(replay(made, script.plans), script.results)
    assert bool(made.graphs.replayed) == bool(sizes)


def test_steps_with_adapters_have_graphs_of_their_own(llama: Pair, tmp_path: Path) -> None:
    """But for adapters with biases and those of the head; steps of the base model alone keep theirs."""
    adapters = Adapters(tmp_path, llama.config)
    made = device_runner(llama, (1, 2), adapters=adapters.slots())
    script = Script(made, NUM_BLOCKS)
    for row, slot in enumerate((0, 1, 2, 3, 4)):
        script.add(row, make_prompt(6 + row, row), adapter=slot)
    script.step(dict.fromkeys(range(5), 6), adapters=adapters.changes("two", "all", "biases", "head"))
    captured = made.graphs.dispatcher.stand_in
    adapted = {size: GraphKey(size, adapters=True) for size in (1, 2)}
    script.decode(0)
    assert captured(GraphKey(1)) is not None
    assert captured(adapted[1]) is None
    script.decode(3)
    script.decode(4, steps=2)
    assert captured(adapted[1]) is None
    script.decode(1, 0, steps=8)
    script.decode(2, steps=8)
    assert captured(adapted[2]) == adapted[2]
    assert captured(adapted[1]) == adapted[1]


@pytest.mark.parametrize("right", [0.6, 1.0])
def test_drafts_with_adapters_are_verified_by_graphs(llama: Pair, tmp_path: Path, right: float) -> None:
    adapters, vocab = Adapters(tmp_path, llama.config), llama.config.vocab_size
    prompts = [make_prompt(5 + row, row) for row in range(3)]

    def host(make: Callable[..., Any], proposer: ScriptedProposer, limit: int) -> SpeculativeHost:
        found = SpeculativeHost(
            make(
                adapters=adapters.slots(),
                speculation=lambda rows, options, guides: Speculator(
                    proposer, rows, options, vocab, most=3, trees=False
                ),
            ),
            limit,
        )
        found.slots = adapters.changes("two", "all")
        for row, prompt in enumerate(prompts):
            found.add(row, prompt, adapter=row)
        found.run(12)
        return found

    alone = host(partial(llama.runner, NUM_BLOCKS, BLOCK_SIZE), ScriptedProposer({}, vocab), 0)
    truth = {(tuple(prompt), 0, 0): alone.tokens[row][len(prompt) :] for row, prompt in enumerate(prompts)}
    drafted = host(partial(device_runner, llama, (4,)), ScriptedProposer(truth, vocab, right=right), 3)
    for row, prompt in enumerate(prompts):
        assert drafted.tokens[row][: len(prompt) + 12] == alone.tokens[row][: len(prompt) + 12]
    assert drafted.accepted > 0
    assert drafted.runner.graphs.replayed
