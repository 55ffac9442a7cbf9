"""Notes to the user about a rotation that depends on the longest context, and about slow attention."""

from pathlib import Path

import pytest
import torch
import transformers

from troupellm.kernels.common.triton import installed
from troupellm.kernels.paged_attention.backends import Needs, Planner, choose
from troupellm.models.load.notes import attention_note
from troupellm.tests.support.quantized.quantized_llama import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    config = transformers.Phi3Config(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
        },
    )
    path = tmp_path_factory.mktemp("phi")
    transformers.Phi3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(("context", "told"), [(64, True), (32, False)])
def test_long_factors_for_all_lengths_are_told(folder: Path, context: int, told: bool) -> None:
    worker, seen = load(folder, max_model_len=context)
    notes = [progress.detail for progress in seen if "longrope" in progress.detail]
    wanted = "longrope: long factors for all lengths; --max-model-len 32 takes the short ones"
    assert notes == [wanted] * told
    worker.close()


@pytest.mark.parametrize(
    ("device", "latent", "invariant", "told"),
    [
        ("cuda", 512, True, True),
        ("cuda", 512, False, False),
        ("cuda", 0, True, not installed()),
        ("cpu", 512, True, False),
    ],
)
def test_slow_attention_is_told(device: str, latent: int, invariant: bool, told: bool) -> None:
    needs = Needs(
        torch.device(device),
        torch.bfloat16,
        16,
        1,
        576 if latent else 128,
        16,
        latent=latent,
        batch_invariant=invariant,
    )
    fast = "triton" if installed() else "sdpa"
    slow = f"attention: reference, token by token and without graphs for batch_invariant: much slower than {fast}"
    chosen = choose(needs)
    assert attention_note(Planner(chosen, needs)) == (slow if told else f"attention: {chosen.name}")


def test_attention_is_told_when_a_model_is_loaded(folder: Path) -> None:
    worker, seen = load(folder, attention_backend="torch")
    assert "attention: torch" in [progress.detail for progress in seen]
    worker.close()
