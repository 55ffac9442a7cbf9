"""Results do not depend on the host's default dtype."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from troupellm.kernels.sampling.cases import CASES, VOCAB, make_logits
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import RandomWeights
from troupellm.models.config.decoder_config import RopeConfig
from troupellm.models.gpu.sample import sampled_of
from troupellm.models.layers.rope import rope_frequencies
from troupellm.models.quantization.fp8 import numbers
from troupellm.models.runner.pooler import pool_whole
from troupellm.models.sampling.sampler import Sampler
from troupellm.protocol.messages.worker import RowLogprobs, SamplingState
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt

CPU = torch.device("cpu")
PROMPT, TOKENS = [3, 8, 20], [3, 8, 20, 8, 9]
OPTIONS = {
    "min_tokens": {"min_tokens": 50, "stop_token_ids": tuple(range(0, VOCAB, 2))},
    "bad_words": {"bad_words": ((4,), *((9, token) for token in range(1, VOCAB, 4)))},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 1.3},
    "cut": {"temperature": 0.7, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
}
OPTIONS["together"] = {name: value for options in OPTIONS.values() for name, value in options.items()}
STATES = {case.name: [case.state] for case in CASES} | {
    name: [
        SamplingState(seed=seed, logprobs=3, logprobs_mode=mode, **{"temperature": temperature} | options)
        for seed in range(6)
        for temperature in (0.0, 1.0)
        for mode in ("raw_logprobs", "processed_logprobs")
    ]
    for name, options in OPTIONS.items()
}
FACTORS = tuple(1.0 + 0.1 * i for i in range(8))
LONGROPE = RopeConfig(kind="longrope", factor=4.0, original_max_position=64, short_factor=FACTORS, long_factor=FACTORS)
MADE: dict[str, Callable[[], torch.Tensor]] = {
    "rotations": lambda: rope_frequencies(LONGROPE, 16, 256)[0],
    "scales of one byte": lambda: numbers(torch.arange(256, dtype=torch.uint8)),
    "random weights": lambda: RandomWeights(torch.bfloat16).take("weight", (4, 6)),
    "means": lambda: pool_whole(make_logits(7, 5, 1.0, seed=2), [3, 4], "MEAN"),
    "peaks of a device's rows": lambda: sampled_of(np.array([3, -1]), (0, 1), (5, 5), (), 9, {}).peaks,
}


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("gemma2"), FAMILIES["gemma2"]())


def sampled(states: list[SamplingState]) -> tuple[list[int], list[RowLogprobs]]:
    sampler, rows = Sampler(VOCAB, CPU), range(len(states))
    for row, state in enumerate(states):
        sampler.add_row(row, state, PROMPT, len(PROMPT))
    logits = make_logits(len(rows), VOCAB, 3.0, seed=4)
    found = sampler.sample(logits, rows, [len(TOKENS)] * len(rows), [torch.tensor(TOKENS)] * len(rows))
    assert not found.errors
    return found.values, found.logprobs


@pytest.mark.parametrize("name", STATES)
def test_the_same_tokens_are_sampled(name: str, other: torch.dtype) -> None:
    expected = sampled(STATES[name])
    with default_type(other):
        assert sampled(STATES[name]) == expected


@pytest.mark.parametrize("name", MADE)
def test_the_same_numbers_are_made(name: str, other: torch.dtype) -> None:
    expected = MADE[name]()
    with default_type(other):
        torch.testing.assert_close(MADE[name](), expected, atol=0.0, rtol=0.0, equal_nan=True)


def test_a_decoder_gives_the_same_logits(pair: Pair, other: torch.dtype) -> None:
    def logits() -> torch.Tensor:
        return pair.mistaken(embedding_scale=1.2345).own_logits(make_prompt(20))

    expected = logits()
    with default_type(other):
        torch.testing.assert_close(logits(), expected, atol=0.0, rtol=0.0)


def test_borders_of_a_cache_are_float32(pair: Pair, other: torch.dtype) -> None:
    with default_type(other):
        borders = KVCache(pair.config, 4, 8, torch.bfloat16, border=6).borders
    assert borders is not None
    assert (borders.dtype, borders.shape) == (torch.float32, (4, 6))
