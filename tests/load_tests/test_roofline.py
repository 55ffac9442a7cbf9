"""The roofline's arithmetic against published tables of it, in milliseconds on one H200."""

import random

import msgspec
import pytest

from troupellm.load_tests.roofline import (
    BF16,
    FP8_ALL,
    FP8_WEIGHTS,
    H200,
    H200_FP8,
    SIZES,
    W4A16,
    ModelSize,
    decode_seconds,
    kernel_tax_us,
    prefill_seconds,
    roof_frac,
    workload_seconds,
)

KINDS = {"bf16": (BF16, H200), "fp8 w": (FP8_WEIGHTS, H200_FP8), "fp8": (FP8_ALL, H200_FP8)}
BATCHES = (1, 8, 32, 64, 256)
DECODE = [
    ("qwen3-0.6b", "bf16", 1024, (0.305, 0.496, 1.151, 2.025, 7.378)),
    ("qwen3-0.6b", "bf16", 8192, (0.496, None, 7.269, 14.26, 56.3)),
    ("qwen3-0.6b", "fp8 w", 1024, (0.202, 0.393, 1.049, 1.923, 7.254)),
    ("qwen3-0.6b", "fp8", 1024, (0.188, 0.284, 0.612, 1.049, 3.758)),
    ("qwen3-0.6b", "fp8", 8192, (0.284, None, 3.671, 7.17, 28.2)),
    ("llama-8b", "bf16", 1024, (3.522, 3.740, 4.489, 5.488, 12.854)),
    ("llama-8b", "bf16", 8192, (3.740, None, 11.481, 19.47, 68.8)),
    ("llama-8b", "fp8 w", 1024, (1.899, 2.117, 2.866, 3.865, 10.884)),
    ("llama-8b", "fp8", 1024, (1.883, 1.992, 2.367, 2.866, 6.888)),
    ("qwen3-8b", "bf16", 1024, (3.555, 3.801, 4.644, 5.767, 13.894)),
    ("qwen3-8b", "bf16", 8192, (3.801, None, 12.510, 21.50, 76.8)),
    ("qwen3-8b", "fp8 w", 1024, (1.940, 2.186, 3.028, 4.152, 11.933)),
    ("qwen3-8b", "fp8", 1024, (1.922, 2.045, 2.467, 3.028, 7.438)),
    ("qwen3-30b-a3b", "bf16", 1024, (1.438, 6.197, 13.096, 15.338, 20.274)),
    ("qwen3-30b-a3b", "bf16", 8192, (1.602, None, 18.339, 25.83, 62.2)),
    ("qwen3-30b-a3b", "fp8 w", 1024, (0.803, 3.265, 6.995, 8.490, 13.273)),
    ("qwen3-30b-a3b", "fp8", 1024, (0.791, 3.171, 6.620, 7.741, 10.276)),
]


@pytest.mark.parametrize(("model", "kind", "context", "wanted"), DECODE)
def test_the_bound_of_a_decode_step_follows_from_its_bytes(
    model: str, kind: str, context: int, wanted: tuple[float | None, ...]
) -> None:
    precision, ceilings = KINDS[kind]
    for batch, milliseconds in zip(BATCHES, wanted, strict=True):
        if milliseconds is not None:
            found = decode_seconds(SIZES[model], precision, ceilings, batch=batch, context=context) * 1e3
            assert found == pytest.approx(milliseconds, rel=2e-3, abs=6e-4), batch


@pytest.mark.parametrize(
    ("model", "wanted"), [("qwen3-0.6b", 0.152), ("llama-8b", 1.11), ("qwen3-8b", 1.16), ("qwen3-30b-a3b", 0.50)]
)
def test_the_bound_of_four_bit_weights_follows_from_their_bytes(model: str, wanted: float) -> None:
    found = decode_seconds(SIZES[model], W4A16, H200, batch=1, context=1024) * 1e3
    assert found == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize(
    ("model", "kind", "tokens", "wanted"),
    [
        ("qwen3-0.6b", "bf16", 1024, 1.29),
        ("qwen3-0.6b", "bf16", 8192, 18.9),
        ("qwen3-0.6b", "bf16", 32768, 192),
        ("qwen3-0.6b", "fp8 w", 1024, 0.80),
        ("llama-8b", "bf16", 1024, 18.4),
        ("llama-8b", "fp8 w", 8192, 104),
        ("qwen3-8b", "bf16", 8192, 169),
        ("qwen3-30b-a3b", "bf16", 8192, 90),
    ],
)
def test_the_bound_of_a_prompt_follows_from_its_operations(model: str, kind: str, tokens: int, wanted: float) -> None:
    precision, ceilings = KINDS[kind]
    assert prefill_seconds(SIZES[model], precision, ceilings, tokens=tokens) * 1e3 == pytest.approx(wanted, rel=2e-2)


def test_the_bound_of_the_public_workload_is_the_known_one() -> None:
    """The public 256-request benchmark with seed 0, whose bound is 36,204 output tokens/s."""
    source = random.Random(0)
    prompts = [[source.randint(0, 10000) for _ in range(source.randint(100, 1024))] for _ in range(256)]
    answers = [source.randint(100, 1024) for _ in range(256)]
    assert (sum(map(len, prompts)), sum(answers)) == (142_827, 133_966)
    requests = list(zip(map(len, prompts), answers, strict=True))
    rate = sum(answers) / workload_seconds(SIZES["qwen3-0.6b"], BF16, H200, requests)
    assert rate == pytest.approx(36_204, rel=5e-3)


def test_sizes_come_from_a_configuration() -> None:
    size = SIZES["qwen3-30b-a3b"]
    config = {
        "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "model_type": "qwen3_moe",
    }  # fmt: skip
    assert ModelSize.of(config) == size
    assert size.kv_numbers * 2 == 98_304
    assert (size.dense_params / 1e9, size.expert_params / 1e9) == pytest.approx((0.919, 0.2265), rel=2e-3)
    dense = msgspec.structs.replace(SIZES["qwen3-8b"])
    assert (dense.dense_params / 1e9, dense.head_params / 1e9) == pytest.approx((6.946, 0.622), rel=1e-3)


def test_a_report_has_the_share_of_the_bound_and_the_kernel_tax() -> None:
    assert roof_frac(3.0, 4.0) == 0.75
    assert kernel_tax_us(3.555e-3, 5.375e-3, 364) == pytest.approx(5.0)
