"""Faults of kernels/."""

from typing import Final

from troupellm.tests.mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "a part of low rank lies directly behind the one before it",
        "kernels/low_rank/weights.py",
        "begin, first = part * self.rank, self.begins[part]",
        "begin, first = part * rank, self.begins[part]",
        "kernels/low_rank/test_low_rank.py",
    ),
    Mutant(
        "all rows of a group lie side by side",
        "kernels/low_rank/weights.py",
        "together = last - first == end - begin - 1",
        "together = last - first >= end - begin - 1",
        "kernels/low_rank/test_low_rank.py",
    ),
    Mutant(
        "the largest number of a row has no place in int8",
        "kernels/act_quant/reference.py",
        "LARGEST_INT8 = 127",
        "LARGEST_INT8 = 128",
        "kernels/kv_quant/test_kv_quant.py",
    ),
    Mutant(
        "the offset of a norm's weight is left out",
        "kernels/rms_norm/reference.py",
        "(weight.float() + offset)",
        "weight.float()",
        "kernels/rope_kv_write/test_fused_operations.py",
    ),
    Mutant(
        "top_k leaves out the k-th token",
        "kernels/sampling/truncate.py",
        "kept = ((values >= cut) | unlimited)",
        "kept = ((values > cut) | unlimited)",
        "kernels/sampling/test_sampling.py",
    ),
    Mutant(
        "top_p leaves out the token that reaches it",
        "kernels/sampling/truncate.py",
        "running - weights < nucleus.top_p * total",
        "running < nucleus.top_p * total",
        "kernels/sampling/test_sampling.py",
    ),
    Mutant(
        "the likeliest token has rank two",
        "kernels/sampling/logprobs.py",
        "ranks = (logprobs > of_chosen)",
        "ranks = (logprobs >= of_chosen)",
        "kernels/sampling/test_sampling.py",
    ),
    Mutant(
        "a repetition penalty raises negative logits",
        "kernels/sampling/adjust.py",
        "torch.where(values > 0, values / penalties, values * penalties)",
        "values / penalties",
        "kernels/sampling/test_adjust.py",
    ),
    Mutant(
        "the presence penalty is not subtracted",
        "kernels/sampling/adjust.py",
        "frequency * counters[slots] - presence",
        "frequency * counters[slots]",
        "kernels/sampling/test_adjust.py",
    ),
    Mutant(
        "answers of one request draw the same noise",
        "kernels/sampling/noise.py",
        "for word in (seed, fork, purpose):",
        "for word in (seed, 0, purpose):",
        "kernels/sampling/test_sampling.py",
    ),
    Mutant(
        "experts are chosen by the best of a group where the two best count",
        "kernels/fused_moe/reference.py",
        'if routing.group_score == "max"',
        'if routing.group_score != "none"',
        "kernels/fused_moe/test_fused_moe.py",
    ),
    Mutant(
        "a sliding window shows one key too many",
        "kernels/paged_attention/plan.py",
        "first = np.maximum(0, behind - self.window) if self.window",
        "first = np.maximum(0, behind - self.window - 1) if self.window",
        "kernels/paged_attention/test_paged_attention.py",
    ),
    Mutant(
        "a long prompt in a window sees one key too many",
        "kernels/paged_attention/plan.py",
        "mask &= keys > queries - self.window",
        "mask &= keys >= queries - self.window",
        "kernels/paged_attention/test_paged_attention.py",
    ),
    Mutant(
        "compiled code accepts rows that overlap",
        "kernels/cpp/checks.py",
        "if found != rows or (rows > 1 and apart < width):",
        "if found != rows:",
        "kernels/cpp/test_native.py kernels/cpp/test_guard.py kernels/quantized_linear/test_refused_products.py",
    ),
    Mutant(
        "a write behind a result is not noticed",
        "kernels/cpp/guard.py",
        " and (memory[-NUM_BYTES:] == BYTE).all()",
        "",
        "kernels/cpp/test_guard.py",
    ),
    Mutant(
        "a row of zeros becomes NaN in fp8",
        "kernels/quantized_linear/fp8.py",
        "values = weight.float() / torch.where(scale > 0, scale, 1.0)[:, None]",
        "values = weight.float() / scale[:, None]",
        "kernels/quantized_linear/test_quantized.py",
    ),
    Mutant(
        "a residual is added without its factor",
        "kernels/linear/__init__.py",
        "residual.add_(linear(x, packed), alpha=factor)",
        "residual.add_(linear(x, packed))",
        "kernels/linear/test_linear_fused.py",
    ),
)
