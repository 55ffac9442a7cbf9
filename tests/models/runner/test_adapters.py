"""Rows with adapters: each gives the tokens of its adapter merged into the model, in any company."""

import copy
from pathlib import Path
from typing import Literal

import pytest
import torch

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.quantized_linear import QuantizedWeight, Weight
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_table import PlanError
from troupellm.models.checkpoint.safetensors import Checkpoint, WeightSource
from troupellm.models.layers.decoder import Decoder
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.speculation.speculator import Speculator
from troupellm.protocol.messages.worker import AdapterSlot
from troupellm.tests.support.adapters.adapted_runner import Adapters
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.watched_logits import watched_logits
from troupellm.tests.support.speculation.scripted_drafts import ScriptedProposer, SpeculativeHost

NEW_TOKENS = 8
PROMPT = make_prompt(19)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"), pair.config)


@pytest.fixture(scope="module")
def answers(pair: Pair, adapters: Adapters) -> dict[str, list[int]]:
    """Each adapter's answer in a runner of its own; "" is the base model's, in a runner without slots."""
    found = {}
    for name in ("", *adapters.names):
        driver = adapters.driver(pair, name) if name else Driver(pair.runner())
        driver.submit(0, PROMPT, 1 if name else 0)
        driver.generate(0, NEW_TOKENS)
        found[name] = driver.answer(0)
    return found


def crowd(adapters: Adapters, driver: Driver, chunk: int) -> dict[str, list[int]]:
    """All adapters and the base model on one prompt, in the same steps."""
    names = ["", *adapters.names]
    for row, name in enumerate(names):
        driver.submit(row, PROMPT, adapters.slot(name))
    while any(driver.generated(row) < NEW_TOKENS for row in range(len(names))):
        driver.run({row: min(chunk, len(driver.tokens[row]) - driver.done[row]) for row in range(len(names))})
    return {name: driver.answer(row)[:NEW_TOKENS] for row, name in enumerate(names)}


def merged(pair: Pair, adapters: Adapters, name: str) -> Pair:
    """The model of transformers with an adapter's products added to its weights."""
    found = copy.copy(pair)
    found.reference = copy.deepcopy(pair.reference)
    scales = {"two": 2.0, "all": 16 / 8**0.5, "head": 2.0, "one": 2.0}
    modules = dict(found.reference.named_modules())
    tensors = adapters.tensors[name]
    for key in tensors:
        if key.endswith(".lora_A.weight"):
            begin = key.removesuffix(".lora_A.weight")
            weight = modules[begin.removeprefix("base_model.model.")].weight
            with torch.no_grad():
                weight += scales[name] * tensors[f"{begin}.lora_B.weight"] @ tensors[key]
    return found


@pytest.mark.parametrize("name", ["two", "all", "head"])
def test_an_adapter_gives_the_tokens_of_the_merged_model(
    pair: Pair, adapters: Adapters, answers: dict[str, list[int]], name: str
) -> None:
    assert answers[name] == merged(pair, adapters, name).greedy(PROMPT, NEW_TOKENS)


def test_adapters_answer_differently(answers: dict[str, list[int]]) -> None:
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)


@pytest.mark.parametrize("chunk", [100, 5])
def test_a_crowd_gets_the_tokens_of_each_alone(
    pair: Pair, adapters: Adapters, answers: dict[str, list[int]], chunk: int
) -> None:
    assert crowd(adapters, adapters.driver(pair), chunk) == answers


def test_a_row_that_is_told_anew_goes_on_with_its_adapter_in_another_slot(
    pair: Pair, adapters: Adapters, answers: dict[str, list[int]]
) -> None:
    """As after a preemption, or in a new worker."""
    for name in adapters.names:
        driver = adapters.driver(pair, "two", name)
        driver.submit(3, [*PROMPT, *answers[name][:4]], 2)
        driver.generate(3, NEW_TOKENS - 4)
        assert driver.answer(3) == answers[name][4:]


def test_a_slot_serves_one_adapter_after_another(pair: Pair, adapters: Adapters, answers: dict[str, list[int]]) -> None:
    driver = adapters.driver(pair, "biases")
    for row, name in enumerate(("biases", "head", "two", "all")):
        driver.slots = adapters.changes(name)
        driver.submit(row, PROMPT, 1)
        driver.generate(row, NEW_TOKENS)
        assert driver.answer(row) == answers[name]


def test_a_row_of_the_base_model_is_computed_to_the_bit_as_in_a_runner_without_slots(
    pair: Pair, adapters: Adapters
) -> None:
    found = []
    for driver in (Driver(pair.runner()), adapters.driver(pair)):
        if driver.slots:  # a row with an adapter is known, but not in the steps
            driver.submit(9, PROMPT, 2)
            driver.run({9: 3})
        driver.submit(0, PROMPT)
        with watched_logits(driver.runner) as seen:
            driver.generate(0, NEW_TOKENS)
        found.append(seen)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_drafts_are_verified_with_the_rows_adapter(pair: Pair, adapters: Adapters) -> None:
    """The drafts are the base model's own tokens, some of which the adapter would choose, too."""
    alone = adapters.driver(pair)
    for row, name in enumerate(("", *adapters.names)):
        alone.submit(row, PROMPT, adapters.slot(name))
        alone.generate(row, NEW_TOKENS)
    truth = {(tuple(PROMPT), 0, 0): alone.answer(1)}
    proposer = ScriptedProposer(truth, pair.config.vocab_size, right=0.9)
    runner = pair.runner(
        160,
        adapters=adapters.slots(),
        speculation=lambda rows, options, guides: Speculator(proposer, rows, options, pair.config.vocab_size),
    )
    host = SpeculativeHost(runner, 4)
    host.slots = adapters.changes(*adapters.names)
    for row, name in enumerate(("", *adapters.names)):
        host.add(row, PROMPT, adapter=adapters.slot(name))
    found = host.run(NEW_TOKENS)
    assert {row: tokens[:NEW_TOKENS] for row, tokens in found.items()} == {
        row: alone.answer(row)[:NEW_TOKENS] for row in alone.tokens
    }
    assert host.accepted > 0


class Dequantized(QuantizeOnLoad):
    """The numbers that quantized weights stand for."""

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        weight = super().linear(name, shape)
        return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def decoder_of(pair: Pair, source: WeightSource) -> Decoder:
    return Decoder(pair.config, source, max_model_len=MAX_LEN)


def scores_of(pair: Pair, adapters: Adapters, decoder: Decoder) -> torch.Tensor:
    """Logits behind the prompt, of the base model and each adapter, in one step."""
    cache = KVCache(pair.config, 120, 8, decoder.dtype)
    slots = adapters.slots(decoder.dtype)
    driver = Driver(ModelRunner(decoder, cache, max_model_len=MAX_LEN, adapters=slots))
    driver.slots = adapters.changes(*adapters.names)
    for row, name in enumerate(("", *adapters.names)):
        driver.submit(row, PROMPT, adapters.slot(name))
    with watched_logits(driver.runner) as seen:
        driver.run(dict.fromkeys(driver.tokens, len(PROMPT)))
    return seen[-1]


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_adapters_over_rounded_weights_give_the_scores_over_plain_ones(
    pair: Pair, adapters: Adapters, mode: Literal["int8", "int4"] | None
) -> None:
    """Over bfloat16, or over quantized weights against the numbers that these stand for. Inputs are rounded, too."""
    plain = Checkpoint(pair.folder, torch.float32)
    if mode is None:
        exact, rounded = pair.decoder, decoder_of(pair, Checkpoint(pair.folder, torch.bfloat16))
    else:
        exact = decoder_of(pair, Dequantized(Checkpoint(pair.folder, torch.float32), mode))
        rounded = decoder_of(pair, QuantizeOnLoad(plain, mode))
    expected, got = scores_of(pair, adapters, exact), scores_of(pair, adapters, rounded)
    apart = (expected - got).norm(dim=1) / expected.norm(dim=1)
    of_adapters = (expected[1:] - expected[:1]).norm(dim=1) / expected[1:].norm(dim=1)
    assert apart.max() < 0.1
    assert of_adapters.min() > 0.3


@pytest.mark.parametrize("mode", [None, "int8"])
def test_a_batch_invariant_model_gives_each_row_the_same_bits_in_any_company(
    pair: Pair, adapters: Adapters, mode: Literal["int8"] | None
) -> None:
    with batch_invariant():
        source: WeightSource = Checkpoint(pair.folder, torch.float32)
        decoder = decoder_of(pair, source if mode is None else QuantizeOnLoad(source, mode))
    found = []
    for rows in ([0, 1, 2, 3, 4, 5], [4], [0], [5, 2]):
        cache = KVCache(pair.config, 120, 8, torch.float32)
        driver = Driver(ModelRunner(decoder, cache, max_model_len=MAX_LEN, adapters=adapters.slots()))
        driver.slots = adapters.changes(*adapters.names)
        for row in rows:
            driver.submit(row, PROMPT, row)
        for _ in range(3):
            with watched_logits(driver.runner) as seen:
                driver.run({row: len(driver.tokens[row]) - driver.done[row] for row in rows})
            found.append(dict(zip(rows, seen[-1], strict=True)))
    together = found[:3]
    for step, scores in enumerate(found[3:]):
        for row, logits in scores.items():
            assert torch.equal(logits, together[step % 3][row]), f"row {row}, step {step}"


def test_plans_that_name_no_adapter_that_is_there_are_refused(pair: Pair, adapters: Adapters) -> None:
    driver = adapters.driver(pair, "two")
    driver.submit(0, PROMPT, 2)
    with pytest.raises(PlanError, match="adapter slot 2 holds none"):
        driver.run({0: 4})
    driver.slots = (AdapterSlot(1, "0" * 64),)
    with pytest.raises(PlanError, match="adapter 0000000000000000 is not prepared for slot 1"):
        driver.run({})
    without = Driver(pair.runner())
    without.submit(0, PROMPT, 1)
    with pytest.raises(PlanError, match="adapter slot 1 holds none"):
        without.run({0: 4})
    without.slots = adapters.changes("two")
    with pytest.raises(PlanError, match="is not prepared for slot 1"):
        without.run({})


@pytest.mark.parametrize("family", ["nemotron", "cohere2"])
def test_layers_with_layer_norms_take_adapters(family: str, tmp_path: Path) -> None:
    """Feed-forward parts without a gate, and parts side by side."""
    pair = Pair(tmp_path / "model", FAMILIES[family]())
    adapters = Adapters(tmp_path, pair.config, {"one": {"rank": 4}, "other": {"names": ("down_proj",), "rank": 2}})
    together = crowd(adapters, adapters.driver(pair), 7)
    assert together["one"] == merged(pair, adapters, "one").greedy(PROMPT, NEW_TOKENS)
    assert together[""] == pair.greedy(PROMPT, NEW_TOKENS)
    assert len(set(map(tuple, together.values()))) == 3


def test_other_families_mix_adapters_too(tmp_path: Path) -> None:
    """Merged checkpoints of query, key and value, norms behind the parts, factors on residuals."""
    for family in ("phi3", "gemma3", "granite"):
        pair = Pair(tmp_path / family, FAMILIES[family]())
        names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "q_proj", "up_proj")
        kinds = {"one": {"names": names, "rank": 4}, "other": {"names": ("o_proj", "down_proj"), "rank": 2}}
        adapters = Adapters(tmp_path / f"{family}-adapters", pair.config, kinds)
        alone = {}
        for name in adapters.names:
            driver = adapters.driver(pair, name)
            driver.submit(0, PROMPT, 1)
            driver.generate(0, NEW_TOKENS)
            alone[name] = driver.answer(0)
        together = crowd(adapters, adapters.driver(pair), 7)
        base = together.pop("")
        assert together == alone
        assert base == pair.greedy(PROMPT, NEW_TOKENS)
