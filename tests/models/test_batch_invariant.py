"""--batch-invariant: a sequence's logits are the same, to the bit, whatever else is computed, and however it is cut."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from decoder_pairs import FAMILIES, MAX_LEN, Driver, make_prompt
from quantized_llama import load, tiny_llama, tokens_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from troupellm.kernels import linear as linear_kernel
from troupellm.kernels.linear import batch_invariant
from troupellm.kernels.paged_attention import native as native_attention
from troupellm.models import runner as runner_module
from troupellm.models.checkpoint import RandomWeights
from troupellm.models.decoder import Decoder
from troupellm.models.hf_config import ConfigReader
from troupellm.models.kv_cache import KVCache
from troupellm.models.registry import describe_decoder
from troupellm.models.runner import ModelRunner

NEW_TOKENS = 4
PROMPTS = {row: make_prompt(length, seed=row) for row, length in enumerate((3, 41, 17, 70, 1, 9, 30, 2, 55))}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
CASES = [
    *(
        pytest.param(family, torch.float32, True, marks=needs_compiler, id=family)
        for family in ("llama", "qwen3", "gemma2", "olmo2", "smollm3", "glm4", "qwen2_moe", "deepseek_v3", "gpt_oss")
    ),
    pytest.param("mixtral", torch.float32, True, marks=[needs_compiler, pytest.mark.slow], id="mixtral"),
    pytest.param("llama", torch.float32, False, marks=pytest.mark.slow, id="llama-torch"),
    pytest.param("llama", torch.bfloat16, False, marks=pytest.mark.slow, id="llama-bfloat16"),
]


class Recorder:
    """Runs rows of one decoder and keeps the logits of each generated token."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoder, self.dtype = decoder, dtype
        self.last: list[torch.Tensor] = []
        plain = decoder.logits

        def record(hidden: torch.Tensor) -> torch.Tensor:
            found = plain(hidden)
            self.last = list(found.clone())
            return found

        monkeypatch.setattr(decoder, "logits", record)

    def driver(self, seed: int) -> Driver:
        cache = KVCache(self.decoder.config, 200, 8, self.dtype)
        cache.storage.fill_(float("nan"))
        return Driver(ModelRunner(self.decoder, cache, max_model_len=MAX_LEN), seed)

    def run(self, driver: Driver, spans: dict[int, int], found: dict[tuple[int, int], torch.Tensor]) -> None:
        """found: by row and the length of what was known of it."""
        ending = [row for row, count in spans.items() if driver.done[row] + count == len(driver.tokens[row])]
        lengths = [len(driver.tokens[row]) for row in ending]
        driver.run(spans)
        for row, length, logits in zip(ending, lengths, self.last if ending else [], strict=True):
            found[row, length] = logits

    def alone(self) -> tuple[dict[tuple[int, int], torch.Tensor], dict[int, list[int]]]:
        """Each row by itself, its prompt in one go: logits, and all tokens."""
        found: dict[tuple[int, int], torch.Tensor] = {}
        tokens = {}
        for row, prompt in PROMPTS.items():
            driver = self.driver(row)
            driver.submit(row, prompt)
            while driver.generated(row) < NEW_TOKENS:
                self.run(driver, {row: len(driver.tokens[row]) - driver.done[row]}, found)
            tokens[row] = driver.tokens[row]
        return found, tokens

    def together(self) -> dict[tuple[int, int], torch.Tensor]:
        """All rows in every step."""
        found: dict[tuple[int, int], torch.Tensor] = {}
        driver = self.driver(20)
        for row, prompt in PROMPTS.items():
            driver.submit(row, prompt)
        while any(driver.generated(row) < NEW_TOKENS for row in PROMPTS):
            self.run(driver, {row: len(driver.tokens[row]) - driver.done[row] for row in PROMPTS}, found)
        return found


def recorder_of(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = FAMILIES[family]()
    if family == "gpt_oss":
        made.intermediate_size = 37  # no whole number of vectors
    known = {**made.to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[made.model_type]]}
    config = describe_decoder(ConfigReader(known))
    return Recorder(Decoder(config, RandomWeights(dtype, scale=0.3), max_model_len=MAX_LEN), dtype, monkeypatch)


@pytest.mark.parametrize(("family", "dtype", "compiled"), CASES)
def test_logits_do_not_depend_on_the_batch(
    family: str, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(linear_kernel, "native_weight", lambda *given, **named: None)
        monkeypatch.setattr(native_attention, "load", lambda: None)
    with batch_invariant():
        recorder = recorder_of(family, dtype, monkeypatch)
    expected, tokens = recorder.alone()
    compare(recorder.together(), expected)

    order = random.Random(4)  # in crowds that come and go, prompts in chunks, rows at other places
    monkeypatch.setattr(runner_module, "PIECE_TOKENS", 23)
    driver = recorder.driver(21)
    found: dict[tuple[int, int], torch.Tensor] = {}
    for row, prompt in PROMPTS.items():
        driver.submit(row, prompt)
    while left := [row for row in PROMPTS if driver.generated(row) < NEW_TOKENS]:
        crowd = order.sample(left, order.randint(1, len(left)))
        spans = {row: min(order.randint(1, 40), len(driver.tokens[row]) - driver.done[row]) for row in crowd}
        recorder.run(driver, spans, found)
    compare(found, expected)

    driver = recorder.driver(22)  # preempted: what was generated is computed again, as a prompt
    found.clear()
    for row in PROMPTS:
        driver.submit(row, tokens[row][:-1])
    recorder.run(driver, {row: len(driver.tokens[row]) for row in PROMPTS}, found)
    compare(found, {place: logits for place, logits in expected.items() if place in found})
    assert len(found) == len(PROMPTS)


@pytest.mark.parametrize("invariant", [True, False])
def test_steps_of_any_size_take_the_same_threads(
    invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries may cut their sums by the number of threads; otherwise both numbers are tried."""
    tiny_llama().save_pretrained(tmp_path)
    worker, _ = load(tmp_path, batch_invariant=invariant, num_threads=2)
    used, run = set(), worker._runner.run
    monkeypatch.setattr(worker._runner, "run", lambda *given: used.add(torch.get_num_threads()) or run(*given))
    tokens_of(worker)
    worker.close()
    assert used == ({2} if invariant else {1, 2})


def compare(found: dict[tuple[int, int], torch.Tensor], expected: dict[tuple[int, int], torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    different = [place for place in found if not torch.equal(found[place], expected[place])]
    assert not different, f"(row, length) whose logits differ: {different}"


def test_without_it_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else there would be no need of it, and the test above would show nothing."""
    few = linear_kernel.native.FEW_ROWS
    monkeypatch.setattr(linear_kernel.native, "most_rows", lambda *given: few)  # else oneDNN has no part
    recorder = recorder_of("llama", torch.float32, monkeypatch)
    expected, _ = recorder.alone()
    found = recorder.together()
    assert any(not torch.equal(found[place], expected[place]) for place in found if place in expected)
