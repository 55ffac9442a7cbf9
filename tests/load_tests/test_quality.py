"""`bench quality` compares models that compute the same function, token by token."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from troupellm.load_tests.quality.checkpoint import reordered
from troupellm.load_tests.quality.scores import Scores, compared, windows
from troupellm.load_tests.quality.texts import texts

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 90,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen2Config(**SIZES), Gemma3TextConfig(**SIZES)])
def test_another_order_of_the_inner_dimensions_keeps_the_logits(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)  # biases and norms too, which begin as zeros and ones
    ids = torch.randint(90, (2, 20))
    with torch.inference_mode():
        expected = model(ids).logits
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    after = reordered(before, 48, 80, 16, seed=3)
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {name for name in before if "proj.weight" in name or "embed" in name} <= moved
    model.load_state_dict(after)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_model_beside_itself_changes_nothing() -> None:
    scores = Scores([-1.0, -2.0, -0.5], [3, 4, 5])
    found = compared(scores, scores)
    assert found.perplexity == pytest.approx(math.exp(3.5 / 3))
    assert (found.change, found.error, found.agreement) == (0.0, 0.0, 1.0)


def test_a_worse_model_has_a_positive_change_with_the_error_of_its_differences() -> None:
    found = compared(Scores([-1.1, -2.3, -0.5, -1.0], [3, 4, 5, 6]), Scores([-1.0, -2.0, -0.5, -1.0], [3, 9, 5, 6]))
    assert found.change == pytest.approx(math.expm1(0.1))
    assert found.error == pytest.approx(math.exp(0.1) * math.sqrt(0.06 / 3) / 2)
    assert found.agreement == 0.75


def test_windows_cover_the_first_tokens_of_a_text_once() -> None:
    assert windows(range(100), 10, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_every_text_is_long_enough_for_thousands_of_tokens() -> None:
    found = texts()
    assert set(found) == {"prose", "code", "numbers"}
    assert min(map(len, found.values())) > 50_000
