"""With `TROUPE_NATIVE=0`, or without a compiler, torch alone gives the tokens of `transformers`, too."""

from pathlib import Path

import pytest
import torch

from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.kernels.compiled_code import torch_alone

SOME = (
    "llama", "llama_biases", "mistral_window", "qwen2_tied_window", "qwen3", "gemma2", "gemma3", "phi3", "granite",
    "glm", "smollm3_window", "mixtral", "gpt_oss", "deepseek_v2_lite",
)  # fmt: skip
QUICK = ("llama_biases", "gemma2", "gpt_oss", "deepseek_v2_lite")
"""Between them: biases, caps and windows, experts, sinks, and latent vectors."""
NEW_TOKENS = 10


def answers(pair: Pair) -> dict[int, list[int]]:
    """Of prompts in pieces, side by side; what was called is torch's own."""
    driver = Driver(pair.runner())
    for row, length in enumerate((3, 45, 18)):
        driver.submit(row, make_prompt(length, seed=row))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        while min(driver.generated(row) for row in range(3)) < NEW_TOKENS:
            driver.run({row: min(20, len(driver.tokens[row]) - driver.done[row]) for row in range(3)})
    called = {event.key for event in profile.key_averages()}
    assert any(name.startswith("aten::") for name in called)
    assert not [name for name in called if name.startswith("native::")]
    return {row: driver.answer(row) for row in range(3)}


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in SOME]
)
def test_torch_alone_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    with torch_alone():
        pair = Pair(tmp_path, FAMILIES[family]())
        assert pair.decoder.together is None
        for row, answer in answers(pair).items():
            pair.check(make_prompt((3, 45, 18)[row], seed=row), answer)
