"""All layers in one compiled call give what the layers give one by one, to the bit."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from troupellm.kernels import cpp
from troupellm.kernels.fused_decoder import layers as decoder_layers
from troupellm.kernels.fused_decoder.layers import DecoderLayers
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.layers.aux_hidden_states import NO_AUX_HIDDEN_STATES, AuxHiddenStates
from troupellm.models.layers.decoder import EMBEDDING, Decoder
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.models.runner.runner import ModelRunner
from troupellm.tests.support.adapters.adapted_runner import Adapters
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.watched_logits import watched_logits

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")

TOGETHER = (
    ("llama_biases", "float32"), ("llama_biases", "int8"), ("llama_one_kv_head", "float32"),
    ("mistral_window", "float32"), ("qwen3", "int8"), ("granite", "float32"), ("smollm3_window", "float32"),
)  # fmt: skip
APART = ("llama_tied", "glm", "gemma2", "mixtral", "deepseek_v2_lite")
"""Heads that compiled code does not take, pairs side by side, norms behind a part, experts, latent attention."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def read(pair: Pair, bits: str) -> Decoder:
    source = decoder_weights(pair.config, Checkpoint(pair.folder, torch.float32), EMBEDDING)
    return Decoder(pair.config, QuantizeOnLoad(source, "int8") if bits == "int8" else source, max_model_len=MAX_LEN)


def hidden_states(
    decoder: Decoder, kind: torch.dtype, *, together: bool, aux_hidden_states: AuxHiddenStates = NO_AUX_HIDDEN_STATES
) -> tuple[list[torch.Tensor], int]:
    """Of some prompts in pieces, with answers, and what is shown of them; and how many of the steps were one call."""
    calls, layers = 0, decoder.together
    assert layers is not None
    plain = DecoderLayers.run

    def counted(self: DecoderLayers, *given: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return plain(self, *given)

    cache = KVCache(decoder.config, 120, 8, kind)
    if kind == torch.float32:
        cache.storage.fill_(float("nan"))
    runner = ModelRunner(decoder, cache, max_model_len=MAX_LEN)
    seen: list[torch.Tensor] = []
    forward = decoder.forward

    def recorded(batch: ForwardBatch, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        if aux_hidden_states.wanted:
            hidden, shown = decoder.forward_with_aux(batch, caches, aux_hidden_states)
        else:
            hidden = shown = forward(batch, caches)
        seen.append(shown.clone())
        return hidden.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderLayers, "run", counted)
        patch.setattr(decoder, "forward", recorded)
        patch.setattr(decoder, "together", layers if together else None)
        driver = Driver(runner)
        for row, length in enumerate((3, 1, 45, 18)):
            driver.submit(row, make_prompt(length, seed=row))
        for most in (*[7] * 6, 1, 7):  # of the last pieces of prompts, one alone has nothing to go on with
            driver.run({row: min(most, len(driver.tokens[row]) - driver.done[row]) for row in range(4)})
        driver.submit(4, make_prompt(40, seed=4))
        driver.run({4: 20})
        driver.run({4: 20})
        driver.generate(0, 12)
    return seen, calls


@pytest.mark.parametrize(("family", "bits"), TOGETHER)
def test_one_call_gives_what_many_give(family: str, bits: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, FAMILIES[family]())
    decoder = read(pair, bits)
    for kind in (torch.float32, torch.int8) if family == "llama_biases" else (torch.float32,):
        alone, none = hidden_states(decoder, kind, together=False)
        found, calls = hidden_states(decoder, kind, together=True)
        assert none == 0
        assert calls == len(found) == len(alone)
        assert all(torch.equal(got, expected) for got, expected in zip(found, alone, strict=True))
        torch.set_num_threads(1)
        single, _ = hidden_states(decoder, kind, together=True)
        torch.set_num_threads(2)
        assert all(torch.equal(got, expected) for got, expected in zip(single, alone, strict=True))


@pytest.mark.parametrize("bits", ["float32", "int8"])
def test_what_leaves_the_last_layer_is_shown_of_all_tokens(bits: str, tmp_path: Path) -> None:
    decoder, last = read(Pair(tmp_path, FAMILIES["llama_biases"]()), bits), AuxHiddenStates(last=True)
    alone, _ = hidden_states(decoder, torch.float32, together=False, aux_hidden_states=last)
    found, calls = hidden_states(decoder, torch.float32, together=True, aux_hidden_states=last)
    assert calls == len(found) == len(alone)
    assert all(torch.equal(got, expected) for got, expected in zip(found, alone, strict=True))
    _, calls = hidden_states(decoder, torch.float32, together=True, aux_hidden_states=AuxHiddenStates(layers=(0,)))
    assert calls == 0, "what is in between is not seen from outside"


def scores_with_adapters(
    decoder: Decoder, adapters: Adapters, slots: tuple[int, ...], steps: int
) -> list[torch.Tensor]:
    """Logits of rows with these adapter slots, of prompts and of the steps behind them."""
    cache = KVCache(decoder.config, 120, 8, torch.float32)
    driver = Driver(ModelRunner(decoder, cache, max_model_len=MAX_LEN, adapters=adapters.slots()))
    driver.slots = adapters.changes(*adapters.names)
    for row, slot in enumerate(slots):
        driver.submit(row, make_prompt(4 + row, seed=row), slot)
    with watched_logits(driver.runner) as seen:
        for _ in range(steps):
            driver.run({row: min(6, len(driver.tokens[row]) - driver.done[row]) for row in driver.tokens})
    return seen


@pytest.mark.parametrize(("family", "bits"), [("llama_biases", "float32"), ("granite", "float32"), ("qwen3", "int8")])
def test_adapters_in_one_call_add_what_they_add_layer_by_layer(family: str, bits: str, tmp_path: Path) -> None:
    """With biases, factors on the residual, chunks of prompts, and rows that are dropped behind the last attention."""
    pair = Pair(tmp_path / "model", FAMILIES[family]())
    decoder, adapters = read(pair, bits), Adapters(tmp_path, pair.config)
    slots = (1, 0, 2, 3, 1, 4)
    together = scores_with_adapters(decoder, adapters, slots, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "together", None)
        alone = scores_with_adapters(decoder, adapters, slots, 5)
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-3 if bits == "int8" else 2e-4, rtol=1e-3)


@pytest.mark.parametrize("bits", ["float32", "int8"])
def test_rows_of_the_base_model_have_the_same_bits_beside_adapters(bits: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path / "model", FAMILIES["llama_biases"]())
    decoder, adapters = read(pair, bits), Adapters(tmp_path, pair.config)
    beside, without = (
        scores_with_adapters(decoder, adapters, slots, 5) for slots in ((0, 1, 0, 2, 0, 4), (0, 0, 0, 0, 0, 0))
    )
    for found, expected in zip(beside, without, strict=True):
        rows = [0, 2, 4] if found.shape[0] == 6 else [0]
        assert torch.equal(found[rows], expected[rows])


@pytest.mark.parametrize("family", APART)
def test_layers_that_are_otherwise_made_stay_apart(family: str, tmp_path: Path) -> None:
    assert Pair(tmp_path, FAMILIES[family]()).decoder.together is None


def test_quantized_weights_or_a_missing_compiler_keep_layers_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, FAMILIES["llama"]())
    source = decoder_weights(pair.config, Checkpoint(pair.folder, torch.float32), EMBEDDING)
    assert Decoder(pair.config, QuantizeOnLoad(source, "fp8"), max_model_len=MAX_LEN).together is None
    monkeypatch.setattr(decoder_layers, "load", lambda: None)
    assert pair._read()[0].together is None
    monkeypatch.setattr(cpp, "load", lambda: None)
    assert decoder_layers.load() is None


def test_many_rows_go_layer_by_layer(tmp_path: Path) -> None:
    pair = Pair(tmp_path, FAMILIES["llama"]())
    together = pair.decoder.together
    assert together is not None
    together.most_rows = 64
    driver = Driver(pair.runner())
    driver.submit(0, make_prompt(65))
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderLayers, "run", lambda self, *given: called.append(given))
        driver.run({0: 65})
    assert not called
    driver.generate(0, 6)
    pair.check(make_prompt(65), driver.answer(0))
