"""Norms and gates give a GPU's eight-bit products their inputs in eight bits: the same numbers in fewer launches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from troupellm.kernels import act_quant, linear
from troupellm.kernels.quantized_linear.gpu import EightBitProduct
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import RandomWeights
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.gpu.device import CpuDevice
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.layers import attention, feed_forward
from troupellm.models.layers.decoder import Decoder
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan, StepResult
from troupellm.tests.support.gpu.absent_gpu import BLOCK_SIZE, BLOCKS, LENGTH, PLAIN, VARIED
from troupellm.tests.support.gpu.tensor_attention import plan_tensors
from troupellm.tests.support.workers.plan_script import plain

TOKENS = 20


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU's products on a CPU; how many rows each of them has put into eight bits by itself."""
    rows: list[int] = []

    def of_quantized(self: EightBitProduct, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self.values.double() * self.scale.double()[:, None]
        return (codes.double() * scale.double()[:, None] @ weight.t()).to(dtype)

    def counted(x: Tensor, dtype: torch.dtype, made: Any = act_quant.quantize_activation) -> tuple[Tensor, Tensor]:
        rows.append(x.shape[0])
        return made(x, dtype)

    monkeypatch.setattr(EightBitProduct, "of_quantized", of_quantized)
    monkeypatch.setattr(act_quant, "quantize_activation", counted)
    monkeypatch.setattr(
        linear,
        "fast_product",
        lambda weight, bias: EightBitProduct(weight.values, weight.scale, bias, batch_invariant=False),
    )
    return rows


def said(config: DecoderConfig) -> StepResult:
    """Of one prompt."""
    source = QuantizeOnLoad(RandomWeights(torch.float32), "int8")
    decoder = Decoder(config, source, max_model_len=LENGTH)
    cache = KVCache(config, BLOCKS, BLOCK_SIZE, torch.float32)
    runner = CudaRunner(decoder, cache, CpuDevice(), max_model_len=LENGTH, plan=plan_tensors)
    groups = len(cache.layout.windows)
    row = NewRow(
        row=0,
        epoch=1,
        request_id="0",
        token_ids=torch.arange(TOKENS, dtype=torch.int32).numpy().tobytes(),
        num_prompt_tokens=TOKENS,
        sampling=SamplingState(temperature=0.0, logprobs=5),
        blocks=tuple(tuple(range(3 * group, 3 * group + 3)) for group in range(groups)),
    )
    plan = StepPlan(step=0, engine_epoch=0, rows=(0,), epochs=(1,), starts=(0,), counts=(TOKENS,), new_rows=(row,))
    return plain(runner.run(plan))


@pytest.mark.parametrize("config", [PLAIN, VARIED], ids=["plain", "varied"])
def test_the_same_numbers_without_a_launch_of_their_own(
    config: DecoderConfig, coded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = said(config)
    few = len(coded)
    coded.clear()
    for part in (attention, feed_forward):
        monkeypatch.setattr(part, "activation_dtype", lambda packed: None)
    apart = said(config)
    assert together.logprobs == apart.logprobs
    assert together == apart
    assert len(coded) - few == 3 * config.num_layers  # what goes into q, k and v, into gate and up, and into down
    assert few >= config.num_layers  # what comes out of the attention


def test_products_that_take_no_codes_are_given_none() -> None:
    assert linear.activation_dtype(linear.pack(torch.randn(4, 6))) is None
