"""Norms with an offset in their weights, in types of few bits: what `transformers` computes, to the bit."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from troupellm.kernels.rms_norm import add_rms_norm, rms_norm
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.layers.decoder import EMBEDDING, Decoder
from troupellm.models.layers.norm import take_norm
from troupellm.models.load.architecture import describe_model
from troupellm.models.runner.runner import ModelRunner
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt

SIZE = 64
SHORT = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("gemma3"), FAMILIES["gemma3"]())


@pytest.mark.parametrize("dtype", SHORT)
def test_a_small_weight_keeps_its_bits_beside_the_offset(tmp_path: Path, gemma: Pair, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = ((torch.rand(SIZE, generator=generator) - 0.5) * 0.02).to(dtype)
    save_file({"norm.weight": weight}, tmp_path / "model.safetensors")
    taken = take_norm(gemma.config, Checkpoint(tmp_path, dtype), "norm", SIZE)
    reference = Gemma3RMSNorm(SIZE, eps=1e-6).to(dtype)
    reference.weight.data.copy_(weight)
    x, residual = (torch.randn(40, SIZE, generator=generator).to(dtype) for _ in range(2))
    with torch.inference_mode():
        expected = reference(x)
        got = rms_norm(x, taken, 1e-6)
        assert got.dtype == dtype
        assert torch.equal(got, expected)
        assert torch.equal(add_rms_norm(x, residual.clone(), taken, 1e-6), reference(residual + x))
        assert not torch.equal(rms_norm(x, weight + 1, 1e-6), expected), "weights that lose bits show"


def test_weights_without_an_offset_have_the_type_to_compute_in(tmp_path: Path, gemma: Pair) -> None:
    save_file({"norm.weight": torch.ones(SIZE)}, tmp_path / "model.safetensors")
    plain = msgspec.structs.replace(gemma.config, norm_offset=0.0)
    assert take_norm(plain, Checkpoint(tmp_path, torch.bfloat16), "norm", SIZE).dtype == torch.bfloat16


def test_a_model_with_offsets_computes_in_few_bits(gemma: Pair) -> None:
    """Nothing becomes wider on the way; the logits are near those in float32."""
    config, seen, dtype = describe_model(gemma.folder), [], torch.bfloat16
    source = decoder_weights(config, Checkpoint(gemma.folder, dtype), EMBEDDING)
    decoder = Decoder(config, source, max_model_len=MAX_LEN)
    plain = decoder.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.dtype == dtype
        seen.append(plain(hidden).clone())
        return seen[-1].clone()

    decoder.logits = record
    driver = Driver(ModelRunner(decoder, KVCache(config, 120, 8, dtype), max_model_len=MAX_LEN))
    prompt = make_prompt(30)
    driver.submit(0, prompt)
    driver.run({0: len(prompt)})
    expected = gemma.logits(prompt)[-1]
    assert (seen[0][0] - expected).norm() < 0.25 * expected.norm()
