"""A step on a GPU never waits for it, nor mixes devices: seen without one, on torch's device "meta"."""

import pytest
import torch

from tests.support.absent_gpu import LENGTH, META, PLAIN, ROWS, VARIED, VOCAB, absent, numbers
from tests.support.tensor_attention import plan_tensors
from troupellm.kernels.sampling.noise import token_codes
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.gpu.batch import DeviceSpans
from troupellm.models.gpu.graph_dispatch import GraphKey
from troupellm.models.gpu.logprobs import pairs
from troupellm.models.gpu.penalties import FACTORS, penalize_rows
from troupellm.models.gpu.sampling_tensors import CUT, DRAWN, GREEDY, WIDTH, choose
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates


@pytest.fixture(params=[PLAIN, VARIED], ids=["plain", "varied"])
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return request.param


@pytest.mark.parametrize("kind", [GREEDY, DRAWN, CUT])
def test_a_decode_step(config: DecoderConfig, kind: int) -> None:
    graphs = absent(config, plan_tensors).graphs
    logits, tokens = graphs.decode(GraphKey(ROWS, kind=kind), numbers(WIDTH, ROWS))
    assert (logits.device.type, tokens.device.type) == ("meta", "meta")
    assert (logits.shape, tokens.shape) == ((ROWS, VOCAB), (ROWS,))


def test_a_step_that_verifies(config: DecoderConfig) -> None:
    aux_hidden_states = AuxHiddenStates(last=True)
    absent(config, plan_tensors, aux_hidden_states).graphs.verified(
        GraphKey(1, queries=ROWS), numbers(WIDTH, 1), aux_hidden_states
    )


def test_a_mixed_step(config: DecoderConfig) -> None:
    gpu = absent(config, plan_tensors)
    spans = DeviceSpans(*(numbers(3, dtype=torch.int32) for _ in range(3)), num_tokens=20, decode_rows=1)
    batch = gpu.maker.make(spans, numbers(3), numbers(20), numbers(20), gpu.rows, numbers(2))
    logits = gpu.decoder.logits(gpu.decoder.forward(batch, gpu.cache.layers))
    assert (logits.shape, logits.device.type) == ((2, VOCAB), "meta")
    tokens = choose(logits, numbers(WIDTH, 2), token_codes(VOCAB, META), CUT, gpu.rows.tokens)
    assert (tokens.shape, tokens.device.type) == ((2,), "meta")


def test_rows_that_look_back() -> None:
    logits, texts = torch.zeros(3, VOCAB, device=META), torch.zeros(8, LENGTH, dtype=torch.int32, device=META)
    sound = penalize_rows(logits, torch.zeros(FACTORS + 2, 2, dtype=torch.int64, device=META), texts, LENGTH)
    assert (sound.shape, sound.device.type) == ((3,), "meta")
    told = pairs(logits, torch.zeros(3, dtype=torch.int64, device=META))
    assert (told.shape, told.dtype, told.device.type) == ((3,), torch.int64, "meta")


@pytest.mark.parametrize("kind", [GREEDY, DRAWN, CUT])
def test_what_would_wait_is_seen(kind: int) -> None:
    logits, texts = torch.zeros(2, VOCAB, device=META), numbers(3, LENGTH, dtype=torch.int32)
    tokens = choose(logits, numbers(WIDTH, 2), token_codes(VOCAB, META), kind, texts)
    with pytest.raises(RuntimeError, match="meta tensor"):
        tokens.sum().item()
    with pytest.raises(NotImplementedError):
        tokens[tokens > 0].clone()
