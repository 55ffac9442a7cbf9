"""Every family equals `transformers` on a small random checkpoint: greedy tokens and logits, however a plan is cut.

A token may differ only where the reference's own two best logits are closer than 1e-4.
"""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from troupellm.models import runner as runner_module
from troupellm.models.checkpoint import Checkpoint
from troupellm.models.decoder import HEAD, Decoder
from troupellm.models.kv_cache import KVCache
from troupellm.models.registry import describe_model
from troupellm.models.runner import ModelRunner
from troupellm.protocol.worker import NewRow, RowChange, SamplingState, StepPlan, StepResult

TOLERANCE = 1e-4
MAX_LEN = 192
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama_tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=24),
    "llama_biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama_yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama_linear": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama_one_kv_head": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral_window": lambda: transformers.MistralConfig(**SIZES, sliding_window=20, head_dim=32),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2_tied_window": lambda: transformers.Qwen2Config(
        **SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=12, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "qwen3_tied": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


class Pair:
    """One checkpoint in both engines."""

    def __init__(self, folder: Path, config: transformers.PretrainedConfig) -> None:
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # fresh ones are all 1 or all 0, which hides mistakes
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.save_pretrained(folder)
        self.reference = model
        self.config = describe_model(folder)
        checkpoint = Checkpoint(folder, torch.float32)
        self.decoder = Decoder(self.config, checkpoint, max_model_len=MAX_LEN)
        if self.config.tie_word_embeddings:
            checkpoint.ignore(HEAD)
        checkpoint.finish()

    def runner(self, num_blocks: int = 120, block_size: int = 8) -> ModelRunner:
        cache = KVCache(self.config, num_blocks, block_size, torch.float32)
        cache.storage.fill_(float("nan"))  # what nobody wrote, nobody may read
        return ModelRunner(self.decoder, cache, max_model_len=MAX_LEN)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        output = self.reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0,
        )  # fmt: skip
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.reference(torch.tensor([tokens])).logits[0]

    def check(self, prompt: list[int], got: list[int]) -> None:
        expected = self.greedy(prompt, len(got))
        for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            if ours != theirs:
                best = self.logits([*prompt, *expected[:index]])[-1].topk(2).values
                gap = float(best[0] - best[1])
                assert gap < TOLERANCE, f"token {index} is {ours}, not {theirs}; the reference's gap is {gap}"
                return


class Driver:
    """A scheduler by hand: rows with a cursor, blocks handed out in random order."""

    def __init__(self, runner: ModelRunner, seed: int = 3) -> None:
        self.runner = runner
        self.free = list(range(runner.cache.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.step = 0

    def submit(self, row: int, prompt: list[int]) -> None:
        self.tokens[row], self.prompts[row], self.done[row], self.held[row] = list(prompt), len(prompt), 0, 0

    def run(self, spans: dict[int, int]) -> StepResult:
        """Compute so many tokens of each row."""
        new, changes = [], []
        for row, count in spans.items():
            blocks = self._blocks_for(row, self.done[row] + count)
            if self.done[row] == 0:
                ids = np.array(self.tokens[row], dtype="<i4").tobytes()
                state = SamplingState(temperature=0.0)
                new.append(NewRow(row=row, epoch=1, request_id=str(row), token_ids=ids,
                                  num_prompt_tokens=self.prompts[row], sampling=state, blocks=(blocks,)))  # fmt: skip
            elif blocks:
                changes.append(RowChange(row=row, appended_blocks=(blocks,)))
        rows = tuple(spans)
        result = self.runner.run(
            StepPlan(step=self.step, engine_epoch=0, rows=rows, epochs=(1,) * len(rows), new_rows=tuple(new),
                     starts=tuple(self.done[row] for row in rows), counts=tuple(spans.values()),
                     changes=tuple(changes))
        )  # fmt: skip
        self.step += 1
        tokens = iter(result.tokens)
        for row, count in zip(rows, result.token_counts, strict=True):
            self.done[row] += spans[row]
            self.tokens[row] += [next(tokens) for _ in range(count)]
        assert result.errors == ()
        return result

    def generate(self, row: int, new_tokens: int) -> None:
        while self.generated(row) < new_tokens:
            self.run({row: len(self.tokens[row]) - self.done[row]})

    def generated(self, row: int) -> int:
        return len(self.tokens[row]) - self.prompts[row]

    def answer(self, row: int) -> list[int]:
        return self.tokens[row][self.prompts[row] :]

    def _blocks_for(self, row: int, length: int) -> tuple[int, ...]:
        needed = -(-length // self.runner.cache.block_size) - self.held[row]
        self.held[row] += max(needed, 0)
        return tuple(self.free.pop() for _ in range(needed))


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]())


@pytest.mark.parametrize("length", [1, 8, 45])
def test_prefill_and_decode(pair: Pair, length: int) -> None:
    prompt = make_prompt(length)
    driver = Driver(pair.runner())
    driver.submit(4, prompt)
    driver.generate(4, 12)
    pair.check(prompt, driver.answer(4))


@pytest.mark.parametrize("chunk", [7, 19])
def test_chunked_prefill(pair: Pair, chunk: int) -> None:
    prompt = make_prompt(50)
    driver = Driver(pair.runner())
    driver.submit(0, prompt)
    while driver.done[0] < len(prompt):
        result = driver.run({0: min(chunk, len(prompt) - driver.done[0])})
        assert len(result.tokens) == (driver.done[0] == len(prompt))
    driver.generate(0, 8)
    pair.check(prompt, driver.answer(0))


@pytest.mark.parametrize("piece", [runner_module.PIECE_TOKENS, 11])
def test_a_ragged_batch_with_prefill_and_decode_mixed(pair: Pair, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PIECE_TOKENS", piece)
    lengths = {0: 3, 1: 33, 2: 17, 3: 61, 4: 16, 5: 1}
    driver = Driver(pair.runner())
    for row, length in lengths.items():
        driver.submit(row, make_prompt(length, seed=row))
    arrivals = {0: 0, 1: 0, 2: 1, 3: 3, 4: 4, 5: 6}
    step = 0
    while any(driver.generated(row) < 10 for row in lengths):
        present = [row for row in lengths if arrivals[row] <= step and driver.generated(row) < 10]
        driver.run({row: min(20, len(driver.tokens[row]) - driver.done[row]) for row in present})
        step += 1
    for row, length in lengths.items():
        pair.check(make_prompt(length, seed=row), driver.answer(row))


def test_logits_are_within_tolerance(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, seen = pair.runner(), []
    plain = pair.decoder.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(plain(hidden))
        return seen[-1].clone()

    monkeypatch.setattr(pair.decoder, "logits", record)
    driver = Driver(runner)
    prompt = make_prompt(40)
    driver.submit(0, prompt)
    driver.run({0: 23})
    driver.generate(0, 6)
    expected = pair.logits(driver.tokens[0])[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_preemption_by_recompute_goes_on_with_the_same_tokens(pair: Pair) -> None:
    prompt = make_prompt(21)
    driver = Driver(pair.runner())
    driver.submit(0, prompt)
    driver.generate(0, 5)
    again = Driver(pair.runner(), seed=8)
    again.submit(0, driver.tokens[0])
    again.generate(0, 5)
    pair.check(prompt, driver.answer(0) + again.answer(0))
