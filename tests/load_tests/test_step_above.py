"""The length of sequences that makes all of them generate at once, for any prompt time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from troupellm.load_tests.bench.step import StepBench
from troupellm.load_tests.gpu import engine
from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.step import above
from troupellm.load_tests.step.above import Together, filling, flags_of, prefill_steps, tokens_of_each


def test_all_that_write_at_once_are_counted() -> None:
    together = Together(2, 3)
    assert not any(together.wrote(0, 1) for _ in range(9))  # the other one has not begun
    assert not together.wrote(1, 1)
    assert not any(together.wrote(number, 1) for number in (0, 1, 0, 1, 0, 0))
    assert together.wrote(1, 2)


def test_prompts_take_steps_beside_those_who_write() -> None:
    assert prefill_steps(256, 1024, 8192) == -(-256 * 1024 // (8192 - 256))
    assert prefill_steps(1, 1024, 8192) == 1
    assert tokens_of_each(256, 1024, 64, 8192) > 64 + prefill_steps(256, 1024, 8192)
    with pytest.raises(ValueError, match="no room"):
        prefill_steps(16, 8, 16)


def test_a_server_is_told_what_an_engine_is() -> None:
    flags = flags_of({**filling(64), "block_size": 16}, "block_size", *filling(0))
    expected = {
        "block-size": "16",
        "max-num-batched-tokens": "64",
        "max-num-prefill-tokens": "64",
        "itl-target-ms": "0.0",
    }
    assert dict(zip(flags[::2], flags[1::2], strict=True)) == {f"--{name}": value for name, value in expected.items()}


def test_many_steps_of_prompts_end_in_steady_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have room for ten tokens: the first sequence writes through more of them than count, and then all do."""
    model, seen = write_random_model(tmp_path / "model", SHAPES["tiny"]), list[list[above.Arrivals]]()
    steady = above.steady_step_seconds
    monkeypatch.setattr(above, "steady_step_seconds", lambda answers: seen.append(answers) or steady(answers))
    monkeypatch.setattr(engine, "write_model", lambda name, folder: model)
    for name, value in (("CONTEXT", 16), ("STEPS", 12), ("STEP_TOKENS", 10), ("ROUNDS", 1)):
        monkeypatch.setattr(engine, name, value)
    settings = engine.Models.settings_of
    own = {"num_threads": 1, "dtype": "float32"}
    monkeypatch.setattr(engine.Models, "settings_of", lambda self, *sizes, **more: settings(self, *sizes, **more) | own)
    monkeypatch.setattr(engine, "prompts_of", lambda batch, context, vocab: above.prompts_of(batch, context, 500))
    ceilings: Any = None
    assert engine.Models(torch.device("cpu"), ceilings, tmp_path).engine_step(engine.LARGE, 8) > 0
    (answers,) = seen
    written = [sum(count for _, count in answer) for answer in answers]
    assert written[0] - written[-1] > 12
    assert min(written) >= 12
    assert max(written) < tokens_of_each(8, 16, 12, 10)


def test_the_bench_gives_prompts_what_it_counts_on() -> None:
    bench: Any = StepBench.__new__(StepBench)
    bench.args = type("Args", (), {"context": 128, "load_format": "auto", "quantization": None})
    bench.dtype, bench.device, bench.threads = "float32", torch.device("cpu"), 1
    settings = bench.settings_of(256, 100)
    assert settings["max_num_prefill_tokens"] == settings["max_num_batched_tokens"] > 2 * 256


def test_an_engine_is_measured_some_times(tmp_path: Path) -> None:
    """Rounds are begun while there is time; the engine is given up in the end."""
    model = write_random_model(tmp_path / "model", SHAPES["tiny"])
    settings = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 2, "max_model_len": 64, "block_size": 16}

    def rounds(**more: Any) -> list[float]:
        return above.through_engine(model, settings, above.prompts_of(2, 8, 500), 24, steps=8, **more)

    assert [len(rounds()), len(rounds(rounds=3, round_seconds=60.0)), len(rounds(rounds=3))] == [1, 3, 1]
    with pytest.raises(TimeoutError):
        rounds(limit=1e-3)
