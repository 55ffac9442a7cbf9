"""Mistakes in layers with states change their logits by far more than the tests of parity allow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from troupellm.kernels.linear import pack
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt

Mistake = Callable[[Any], object]
DELTA: dict[str, Mistake] = {
    "beta and steps that read nothing": lambda part: setattr(part, "gates", pack(torch.zeros(8, 64))),
    "a state that forgets nothing": lambda part: part.rate.zero_(),
    "steps without their bias": lambda part: part.step_bias.zero_(),
    "a convolution without its oldest tap": lambda part: part.weight[0].zero_(),
    "a norm without its weight": lambda part: part.norm.fill_(1.0),
}
SSD: dict[str, Mistake] = {
    "a state that forgets nothing": lambda part: part.rate.zero_(),
    "steps without their bias": lambda part: part.step_bias.zero_(),
    "inputs that are not carried past the state": lambda part: part.skip.zero_(),
    "a convolution without its oldest tap": lambda part: part.weight[0].zero_(),
    "a convolution without its bias": lambda part: part.conv_bias.zero_(),
    "a norm without its weight": lambda part: part.norm.fill_(1.0),
}
MISTAKES = {"qwen3_5": DELTA, "mamba2": SSD, "nemotron_h": SSD}


@pytest.mark.parametrize("family", MISTAKES)
def test_each_part_of_a_layer_with_states_matters(family: str, tmp_path: Path) -> None:
    pair, prompt = Pair(tmp_path, FAMILIES[family]()), make_prompt(30)
    right = pair.own_logits(prompt)
    assert (right - pair.logits(prompt)[-1]).abs().max() < 10 * TOLERANCE
    for name, mistake in MISTAKES[family].items():
        wrong = pair.mistaken()
        mistake(wrong.decoder.layers[0].attention)
        assert (wrong.own_logits(prompt) - right).abs().max() > 20 * TOLERANCE, name


@pytest.mark.parametrize("limits", [{"least_step": 0.0}, {"most_step": 0.4}])
def test_the_limits_of_steps_matter(limits: dict[str, float], tmp_path: Path) -> None:
    pair, prompt = Pair(tmp_path, FAMILIES["nemotron_h"]()), make_prompt(30)
    ssd = pair.config.ssd
    assert ssd is not None
    wrong = pair.mistaken(ssd=type(ssd)(**{name: getattr(ssd, name) for name in ssd.__struct_fields__} | limits))
    assert (wrong.own_logits(prompt) - pair.own_logits(prompt)).abs().max() > 100 * TOLERANCE
