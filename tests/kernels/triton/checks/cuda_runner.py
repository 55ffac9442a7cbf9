"""The device's runner over the real kernels: eager and replayed, two steps under way, against the CPU's runner."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from troupellm.kernels import cpp
from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.common.triton import as_on_a_gpu, check_device
from troupellm.kernels.cpp import build
from troupellm.kernels.sampling.triton_adjust import chosen_logprobs_triton, penalize_triton, tally_triton
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.gpu import logprobs as told_logprobs, penalties
from troupellm.models.gpu.batch import triton_planner
from troupellm.models.gpu.device import CpuDevice, CudaDevice
from troupellm.models.gpu.graph_dispatch import GraphKey
from troupellm.models.gpu.launched_step import LaunchedPlan
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.decoder import EMBEDDING, Decoder
from troupellm.models.load.to_device import OnDevice
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.speculation.speculator import MakeSpeculator, Speculator
from troupellm.protocol.messages.worker import MOST_LAUNCHED, StepPlan
from troupellm.tests.support.adapters.adapted_runner import Adapters
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt
from troupellm.tests.support.speculation.scripted_drafts import ScriptedProposer, SpeculativeHost
from troupellm.tests.support.workers.plan_script import Script

DEVICE = check_device()
ON_GPU = DEVICE.type == "cuda"
NUM_BLOCKS, BLOCK_SIZE = 40, 16


@pytest.fixture(autouse=True, scope="module")
def torch_alone() -> Iterator[None]:
    """A CPU's compiled code would compute norms and gates together with the products before or behind them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.SWITCH, "0")
        cpp.load.cache_clear()
        yield
    cpp.load.cache_clear()


def runner(
    pair: Pair, sizes: tuple[int, ...], *, invariant: bool = False, kv_dtype: torch.dtype = torch.float32, **more: Any
) -> CudaRunner:
    decoder = pair.decoder
    if ON_GPU or invariant:
        source = decoder_weights(pair.config, Checkpoint(pair.folder, torch.float32), EMBEDDING)
        with batch_invariant(invariant):
            decoder = Decoder(pair.config, OnDevice(source, DEVICE) if ON_GPU else source, max_model_len=MAX_LEN)
    cache = KVCache(pair.config, NUM_BLOCKS + 1, BLOCK_SIZE, kv_dtype, DEVICE)
    cache.storage.view(torch.uint8).fill_(255)  # NaN
    plan = triton_planner(pair.config, BLOCK_SIZE, kv_dtype, invariant=invariant)
    device = CudaDevice() if ON_GPU else CpuDevice()
    return CudaRunner(decoder, cache, device, max_model_len=MAX_LEN, plan=plan, capture_sizes=sizes, **more)


def replay(made: CudaRunner, plans: list[StepPlan]) -> list[tuple[int, ...]]:
    under_way: deque[LaunchedPlan] = deque()
    tokens = []
    for plan in plans:
        under_way.append(made.launch(plan))
        if len(under_way) == MOST_LAUNCHED:
            tokens.append(made.collect(under_way.popleft()).tokens)
    return tokens + [made.collect(ticket).tokens for ticket in under_way]


def scripted(pair: Pair, steps: int) -> Script:
    script = Script(pair.runner(NUM_BLOCKS, BLOCK_SIZE), NUM_BLOCKS)
    script.add(0, make_prompt(21))
    script.step({0: 13})
    script.add(1, make_prompt(5, 1), temperature=0.8, seed=4, presence_penalty=0.2)
    script.step({0: 8, 1: 5})
    script.add(2, make_prompt(30, 2), temperature=1.1, seed=9, top_k=9, top_p=0.8, logprobs=0)
    script.step({0: 1, 2: 30, 1: 1})
    script.decode(2, 0, 1, steps=steps)
    script.decode(1, 2, steps=1)
    return script


def test_all_of_a_model_by_kernels(tmp_path: Path) -> None:
    """Norms, rotations, attention, gates, experts and draws of prompts in chunks and of decode steps, replayed ones
    among them."""
    folder, config = tmp_path, FAMILIES["qwen3_moe"]()
    config.num_hidden_layers = 2  # the first one without experts, the second one with them
    script = Script(Pair(folder, config).runner(NUM_BLOCKS, BLOCK_SIZE), NUM_BLOCKS)
    script.add(0, make_prompt(11))
    script.step({0: 7})
    script.add(1, make_prompt(4, 1), temperature=0.8, seed=4, min_p=0.01)
    script.step({0: 4, 1: 4})
    script.decode(0, 1, steps=2)
    with as_on_a_gpu(DEVICE):
        made = runner(Pair.stored(folder), (2,))
        while made.idle():  # captures
            pass
        assert replay(made, script.plans) == [result.tokens for result in script.results]
    assert made.graphs.replayed


@pytest.mark.slow
def test_adapters_by_kernels(tmp_path: Path) -> None:
    """Rows of three adapters and of the base model, with biases and a head among them."""
    pair = Pair(tmp_path / "model", FAMILIES["qwen3"]())
    adapters = Adapters(tmp_path, pair.config)
    script = Script(pair.runner(NUM_BLOCKS, BLOCK_SIZE, adapters=adapters.slots()), NUM_BLOCKS)
    for row, slot in enumerate((0, 2, 4, 5)):
        script.add(row, make_prompt(6 + row, row), adapter=slot)
    script.step({0: 6, 1: 4, 2: 8}, adapters=adapters.changes(*adapters.names))
    script.step({0: 1, 1: 3, 3: 9, 2: 1})
    script.decode(2, 0, 1, 3, steps=2)
    with as_on_a_gpu(DEVICE):
        made = runner(pair, (), adapters=adapters.slots(device=DEVICE))
        assert replay(made, script.plans) == [result.tokens for result in script.results]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "deepseek_v2"])
def test_replayed_plans_give_the_same_tokens(tmp_path: Path, family: str) -> None:
    pair = Pair(tmp_path, FAMILIES[family]())
    script = scripted(pair, 2)
    assert replay(runner(pair, (4,)), script.plans) == [result.tokens for result in script.results]


def described(script: Script) -> dict[tuple[int, int], bytes]:
    """By row and position, each token and its log-probability, bit by bit."""
    entries = [entry for result in script.results for entry in result.logprobs]
    return {(entry.row, entry.position): entry.token_ids + entry.logprobs for entry in entries}


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn, torch.int8], ids=str)
def test_log_probabilities_do_not_depend_on_the_batch(tmp_path: Path, kv_dtype: torch.dtype) -> None:
    """With --batch-invariant: alone and in crowds, in one piece and in chunks, eager and replayed with padding."""
    pair = Pair(tmp_path, FAMILIES["qwen3"]())
    prompts = [make_prompt(length, row) for row, length in enumerate((21, 5, 34))]

    def script() -> Script:
        return Script(runner(pair, (4,), invariant=True, kv_dtype=kv_dtype), NUM_BLOCKS)

    alone: dict[tuple[int, int], bytes] = {}
    for row, prompt in enumerate(prompts):
        made = script()
        made.add(row, prompt, logprobs=0)
        made.step({row: len(prompt)})
        made.decode(row, steps=4)
        alone |= described(made)
    crowd = script()
    crowd.add(0, prompts[0], logprobs=0)
    crowd.step({0: 13})
    crowd.add(1, prompts[1], logprobs=0)
    crowd.step({1: 5, 0: 8})
    crowd.add(2, prompts[2], logprobs=0)
    crowd.step({0: 1, 2: 30, 1: 1})
    crowd.step({2: 4, 1: 1})
    crowd.decode(2, 0, 1, steps=2)
    crowd.decode(0, 2)
    assert crowd.runner.graphs.replayed
    found = described(crowd)
    assert len(found) == 14
    assert found == {place: alone[place] for place in found}


@pytest.mark.slow
def test_rows_that_look_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties and log-probabilities of what is said, by their kernels."""
    monkeypatch.setattr(penalties, "penalize", penalize_triton)
    monkeypatch.setattr(penalties, "tally", tally_triton)
    monkeypatch.setattr(told_logprobs, "chosen_logprobs", chosen_logprobs_triton)
    pair = Pair(tmp_path, FAMILIES["qwen3"]())
    script = Script(pair.runner(NUM_BLOCKS, BLOCK_SIZE), NUM_BLOCKS)
    script.add(0, make_prompt(21), repetition_penalty=1.4, logprobs=0)
    script.add(1, make_prompt(5, 1), temperature=0.8, seed=4, frequency_penalty=0.5, presence_penalty=0.3)
    script.step({0: 21, 1: 5})
    script.decode(0, 1, steps=4)
    made = runner(pair, (2,))
    for plan, expected in zip(script.plans, script.results, strict=True):
        got = made.run(plan)
        assert got.tokens == expected.tokens
        assert [entry.ranks for entry in got.logprobs] == [entry.ranks for entry in expected.logprobs]
        values = [np.frombuffer(found.logprobs[0].logprobs, np.float32) for found in (got, expected)]
        np.testing.assert_allclose(*values, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [24 if ON_GPU else 3])
def test_drafts_are_verified_by_graphs(tmp_path: Path, steps: int) -> None:
    """Texts with drafts of any number, right and wrong ones, are the CPU's without; most steps are replayed."""
    pair = Pair(tmp_path, FAMILIES["qwen3"]())
    vocab, prompts = pair.config.vocab_size, [make_prompt(5 + 13 * row, row) for row in range(3)]

    def host(made: ModelRunner, limit: int) -> SpeculativeHost:
        found = SpeculativeHost(made, limit)
        for row, prompt in enumerate(prompts):
            found.add(row, prompt)
        while min(len(found.tokens[row]) - len(prompts[row]) for row in found.tokens) < steps:
            found.step()
        return found

    def drafting(proposer: ScriptedProposer) -> MakeSpeculator:
        return lambda rows, options, guides: Speculator(proposer, rows, options, vocab, most=3, trees=False)

    alone = host(pair.runner(NUM_BLOCKS, BLOCK_SIZE, speculation=drafting(ScriptedProposer({}, vocab))), 0)
    truth = {(tuple(prompt), 0, 0): alone.tokens[row][len(prompt) :] for row, prompt in enumerate(prompts)}
    proposer = ScriptedProposer(truth, vocab, right=0.7, aux_hidden_states=AuxHiddenStates(last=True))
    made = runner(pair, (4,), speculation=drafting(proposer))
    replayed = []
    verify = made.graphs.verify
    made.graphs.verify = lambda key: replayed.append(key) or verify(key)  # type: ignore[method-assign]
    drafted = host(made, 3)
    for row, prompt in enumerate(prompts):
        assert drafted.tokens[row][: len(prompt) + steps] == alone.tokens[row][: len(prompt) + steps]
    assert GraphKey(4, 4) in replayed
    assert drafted.accepted > 0


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPU, reason="only a GPU can be waited for")
def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    pair = Pair(tmp_path, FAMILIES["qwen3"]())
    script = scripted(pair, 12)
    made = runner(pair, (2, 4))
    replay(made, script.plans)  # compiles
    while made.idle():  # captures
        pass
    again = [StepPlan(step=99, engine_epoch=0, rows=(), epochs=(), starts=(), counts=(), freed_rows=(0, 1, 2))]
    replay(made, again)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tickets: deque[LaunchedPlan] = deque()
        for plan in script.plans:
            if len(tickets) == MOST_LAUNCHED:
                torch.cuda.set_sync_debug_mode("default")  # the collecting thread sleeps on an event
                made.collect(tickets.popleft())
                torch.cuda.set_sync_debug_mode("error")
            tickets.append(made.launch(plan))
    finally:
        torch.cuda.set_sync_debug_mode("default")
