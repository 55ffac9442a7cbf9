"""How long a step takes at least on given hardware: bytes over bandwidth, operations over arithmetic, the larger one.

Activations, norms, sampling and the embedding's lookup are left out; what they cost is part of the tax.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import msgspec

MOE_DEFAULTS = {"num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0}


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The measured rates of a device: operations and bytes per second."""

    bandwidth: float
    """Reading."""
    head_flops: float
    """Of products in the type of the language-model head and of attention."""
    block_flops: float
    """Of products in the type of the layers' weights."""


H200 = Ceilings(bandwidth=4.3e12, head_flops=790e12, block_flops=790e12)
H200_FP8 = Ceilings(bandwidth=4.3e12, head_flops=790e12, block_flops=1400e12)
"""For arithmetic without a device: what was measured on another day, and for fp8 assumed."""


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per number."""

    block: float
    head: float
    kv: float


BF16 = Precision(block=2, head=2, kv=2)
FP8_WEIGHTS = Precision(block=1, head=2, kv=2)
FP8_ALL = Precision(block=1, head=2, kv=1)
W4A16 = Precision(block=0.5 + 2 / 128, head=2, kv=2)
"""Groups of 128 with a scale of two bytes."""
FP32 = Precision(block=4, head=4, kv=4)
INT8 = Precision(block=1, head=1, kv=4)


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's numbers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    """Per layer; 0 is a dense model."""
    active_experts: int = 0
    expert_intermediate: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelSize":
        """From a checkpoint's `config.json`."""
        known = {**MOE_DEFAULTS, **config}
        heads = known["num_attention_heads"]
        return cls(
            layers=known["num_hidden_layers"],
            hidden=known["hidden_size"],
            heads=heads,
            kv_heads=known.get("num_key_value_heads") or heads,
            head_dim=known.get("head_dim") or known["hidden_size"] // heads,
            intermediate=known["intermediate_size"],
            vocab=known["vocab_size"],
            experts=known["num_experts"],
            active_experts=known["num_experts_per_tok"],
            expert_intermediate=known["moe_intermediate_size"],
        )

    @property
    def dense_params(self) -> int:
        """Weights that every token meets: attention, and feed-forward or router."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        rest = self.hidden * self.experts if self.experts else 3 * self.hidden * self.intermediate
        return self.layers * (attention + rest)

    @property
    def expert_params(self) -> int:
        """One expert, over all layers."""
        return self.layers * 3 * self.hidden * self.expert_intermediate if self.experts else 0

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_numbers(self) -> int:
        """Per token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def distinct_experts(self, tokens: int) -> float:
        """How many of a layer's experts so many tokens meet, routed uniformly."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - (1.0 - self.active_experts / self.experts) ** tokens)


SIZES = {
    "qwen3-0.6b": ModelSize(
        layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936
    ),
    "llama-8b": ModelSize(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256
    ),
    "qwen3-8b": ModelSize(
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936
    ),
    "qwen3-30b-a3b": ModelSize(
        layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, intermediate=6144, vocab=151936,
        experts=128, active_experts=8, expert_intermediate=768,
    ),
}  # fmt: skip


def _products(size: ModelSize, precision: Precision, ceilings: Ceilings, tokens: int) -> float:
    """Seconds of the layers' products with their weights."""
    dense = max(
        size.dense_params * precision.block / ceilings.bandwidth, 2 * size.dense_params * tokens / ceilings.block_flops
    )
    experts = max(
        size.expert_params * precision.block * size.distinct_experts(tokens) / ceilings.bandwidth,
        2 * size.expert_params * size.active_experts * tokens / ceilings.block_flops,
    )
    return dense + experts


def decode_seconds(size: ModelSize, precision: Precision, ceilings: Ceilings, *, batch: int, context: float) -> float:
    """The shortest step in which `batch` sequences with `context` tokens each get one token more."""
    head = max(
        size.head_params * precision.head / ceilings.bandwidth, 2 * size.head_params * batch / ceilings.head_flops
    )
    return (
        _products(size, precision, ceilings, batch)
        + head
        + attention_seconds(size, precision, ceilings, batch=batch, context=context)
    )


def attention_seconds(
    size: ModelSize, precision: Precision, ceilings: Ceilings, *, batch: int, context: float
) -> float:
    """That step's attention alone: the cache is read once."""
    keys = batch * context
    return max(
        keys * size.kv_numbers * precision.kv / ceilings.bandwidth,
        4 * size.layers * size.heads * size.head_dim * keys / ceilings.head_flops,
    )


def prefill_seconds(size: ModelSize, precision: Precision, ceilings: Ceilings, *, tokens: int) -> float:
    """The shortest time for one prompt; causal attention counts half the square, the head's one row nothing."""
    attention = 2 * size.layers * size.heads * size.head_dim * tokens**2 / ceilings.head_flops
    return _products(size, precision, ceilings, tokens) + attention


def workload_seconds(
    size: ModelSize,
    precision: Precision,
    ceilings: Ceilings,
    requests: Sequence[tuple[int, int]],
    capacity: float = inf,
) -> float:
    """Prompt and answer lengths, all at once: every prompt, then every step with those that still run.

    Args:
        capacity: tokens that the cache holds. Where it does not hold all of them for as long as they run, as many run
            in each step as it holds on average.
    """
    prompts = sum(prefill_seconds(size, precision, ceilings, tokens=prompt) for prompt, _ in requests)
    answers = sum(answer for _, answer in requests)
    held = sum(answer * (prompt + answer / 2) for prompt, answer in requests) / max(answers, 1)
    if len(requests) * held > capacity:
        batch = max(1, int(capacity / held))
        return prompts + answers / batch * decode_seconds(size, precision, ceilings, batch=batch, context=held)
    steps = 0.0
    for step in range(max((answer for _, answer in requests), default=0)):
        live = [prompt + step for prompt, answer in requests if answer > step]
        context = sum(live) / len(live)
        steps += decode_seconds(size, precision, ceilings, batch=len(live), context=context)
    return prompts + steps


def roof_frac(roofline: float, measured: float) -> float:
    """1 is as fast as the hardware goes."""
    return roofline / measured


def kernel_tax_us(roofline: float, measured: float, kernels: int) -> float:
    """Microseconds that each kernel of a step loses: its ramp-up and drain, the gaps, and what the roof leaves out."""
    return (measured - roofline) * 1e6 / kernels
