"""The device's runner with adapters gives what the CPU's runner gives, its graphs only where no row has an adapter."""

from pathlib import Path

import pytest

from troupellm.tests.support.adapters.adapted_runner import Adapters
from troupellm.tests.support.checkpoints.decoder_pairs import Pair, make_prompt
from troupellm.tests.support.gpu.device_runner import BLOCK_SIZE, NUM_BLOCKS, check, device_runner, replay
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
