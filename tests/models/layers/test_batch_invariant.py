"""--batch-invariant: a sequence's logits are equal to the bit, in every batch, and however it is cut."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from troupellm.kernels import linear as linear_kernel
from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import RandomWeights
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.layers.decoder import Decoder
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.models.runner import runner as runner_module
from troupellm.models.runner.runner import ModelRunner
from troupellm.protocol.config.setting_types import OnLoad
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.watched_logits import watched_logits
from troupellm.tests.support.engines.inside import runner_of
from troupellm.tests.support.kernels.compiled_code import needs_compiled_code, torch_alone
from troupellm.tests.support.quantized.quantized_llama import load, tiny_llama, tokens_of

NEW_TOKENS = 4
PROMPTS = {row: make_prompt(length, seed=row) for row, length in enumerate((3, 41, 17, 70, 1, 9, 30, 2, 55))}
INT8_CACHE, FP8_CACHE = torch.int8, torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what it is computed with."""

    family: str
    dtype: torch.dtype = torch.float32
    mode: OnLoad | None = None
    """Of quantization on load."""
    cache: torch.dtype | None = None
    """Of keys and values, where it is not the model's."""
    threads: int = 1
    compiled: bool = True

    def __str__(self) -> str:
        cache = None if self.cache is None else f"{self.cache}-cache".removeprefix("torch.")
        threads = f"{self.threads}-threads" if self.threads > 1 else None
        dtype = None if self.dtype == torch.float32 else str(self.dtype).removeprefix("torch.")
        parts = (self.family, dtype, self.mode, cache, threads, None if self.compiled else "torch")
        return "-".join(part for part in parts if part is not None)


MODES = get_args(OnLoad)
QUICK = [
    *map(Case, ("llama", "qwen3", "gemma2", "olmo2", "smollm3", "glm4", "mixtral", "qwen2_moe", "deepseek_v3")),
    *map(Case, ("gpt_oss", "ministral3", "phi")),
    *(Case("llama", mode=mode) for mode in MODES),
    *(Case("llama", cache=cache) for cache in (INT8_CACHE, FP8_CACHE)),
    Case("gemma2", mode="int4", cache=FP8_CACHE),
    *(Case("qwen2_moe", mode=mode, cache=INT8_CACHE) for mode in MODES),
    *(Case("deepseek_v3", mode=mode, cache=FP8_CACHE) for mode in MODES),
    Case("llama", compiled=False),
    *(Case("llama", mode=mode, cache=INT8_CACHE, compiled=False) for mode in MODES),
    Case("llama", threads=2),  # threads wait long for each other where other processes take theirs: few of them
]
SLOW = [
    *map(Case, ("minimax_m2", "exaone4", "ernie4_5_moe", "cohere2")),
    *(Case(family, threads=2) for family in ("falcon", "gpt_neox", "nemotron")),
    Case("phi", torch.bfloat16, "int8"),
    Case("qwen3", mode="int8", cache=INT8_CACHE, threads=2),
    *(Case("gpt_oss", mode=mode, cache=FP8_CACHE, threads=2) for mode in MODES),
    Case("llama", torch.bfloat16, compiled=False),
    *(Case("llama", torch.bfloat16, mode, FP8_CACHE, threads=2) for mode in MODES),
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


class Recorder:
    """Runs rows of one decoder and keeps the logits of each generated token."""

    def __init__(self, decoder: Decoder, cache: torch.dtype) -> None:
        """cache: the type of keys and values."""
        self.decoder, self.cache = decoder, cache

    def driver(self, seed: int) -> Driver:
        cache = KVCache(self.decoder.config, 200, 8, self.cache)
        cache.storage.view(torch.uint8).fill_(255)  # NaN in every type of floats, and as a scale of int8
        return Driver(ModelRunner(self.decoder, cache, max_model_len=MAX_LEN), seed)

    def run(self, driver: Driver, spans: dict[int, int], found: dict[tuple[int, int], torch.Tensor]) -> None:
        """found: by row and the length of what was known of it."""
        ending = [row for row, count in spans.items() if driver.done[row] + count == len(driver.tokens[row])]
        lengths = [len(driver.tokens[row]) for row in ending]
        with watched_logits(driver.runner) as seen:
            driver.run(spans)
        for row, length, logits in zip(ending, lengths, seen[-1] if ending else [], strict=True):
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


def recorder_of(case: Case) -> Recorder:
    made = FAMILIES[case.family]()
    if case.family == "gpt_oss" and case.mode is None:
        made.intermediate_size = 37  # no whole number of vectors
    known = {**made.to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[made.model_type]]}
    config = describe_decoder(ConfigReader(known))
    plain = RandomWeights(case.dtype, scale=0.3)
    source = plain if case.mode is None else QuantizeOnLoad(plain, case.mode)
    return Recorder(Decoder(config, source, max_model_len=MAX_LEN), case.cache or case.dtype)


@contextmanager
def computing(case: Case) -> Iterator[None]:
    """With its threads, and with compiled code or without."""
    if case.compiled:
        needs_compiled_code()
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        with nullcontext() if case.compiled else torch_alone():
            yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_do_not_depend_on_the_batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with computing(case):
        check(case, monkeypatch)


def check(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, together, in crowds, and preempted."""
    with batch_invariant():
        recorder = recorder_of(case)
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


@pytest.mark.parametrize("compiled", [True, False])
def test_the_number_of_threads_changes_where_compiled_code_adds_up_every_sum(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries may cut their sums by the number of threads."""
    case = Case("llama", compiled=compiled)
    with computing(case):
        tiny_llama().save_pretrained(tmp_path)
        worker, _ = load(tmp_path, batch_invariant=True, num_threads=2)
        used, run = set(), runner_of(worker).run
        monkeypatch.setattr(runner_of(worker), "run", lambda *given: used.add(torch.get_num_threads()) or run(*given))
        tokens_of(worker)
        worker.close()
    assert used == ({1, 2} if compiled else {2})


@pytest.mark.parametrize("mode", [None, *MODES])
def test_logits_do_not_depend_on_the_number_of_threads(mode: OnLoad | None) -> None:
    """Eight are more than most machines have cores for: some leave the team within a step."""
    case = Case("llama", mode=mode)
    with computing(case), batch_invariant():
        recorder = recorder_of(case)
        assert recorder.decoder.thread_invariant
        expected = recorder.together()
    for threads in (2, 3, 8):
        with computing(replace(case, threads=threads)):
            compare(recorder.together(), expected)


def compare(found: dict[tuple[int, int], torch.Tensor], expected: dict[tuple[int, int], torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    different = [place for place in found if not torch.equal(found[place], expected[place])]
    assert not different, f"(row, length) whose logits differ: {different}"


def test_without_it_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else there would be no need of it, and the test above would show nothing."""
    few = linear_kernel.cpu.FEW_ROWS
    monkeypatch.setattr(linear_kernel.cpu, "most_rows", lambda *given: few)  # else oneDNN has no part
    recorder = recorder_of(Case("llama"))
    expected, _ = recorder.alone()
    found = recorder.together()
    assert any(not torch.equal(found[place], expected[place]) for place in found if place in expected)
