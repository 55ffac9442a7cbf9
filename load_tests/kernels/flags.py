"""Flags of `bench kernels`."""

import argparse

from troupellm.load_tests.serve.flags import count, finite

OPERATIONS = (
    "linear", "linear_int8", "rms_norm", "add_rms_norm", "rope", "silu_mul", "gelu_mul", "kv_write", "decode_attention",
    "prefill_attention", "sampling", "fused_moe", "linear_fp8", "rope_kv_write", "row_codes", "grouped_linear",
    "truncated_sampling", "penalties", "chosen_logprobs", "step_begin", "step_end", "linear_invariant",
    "verify_attention", "coded_cache_attention", "latent_attention", "linear_coded", "coded_experts", "guide_masks",
)  # fmt: skip
MODELS = ("24m", "125m", "qwen3-0.6b", "qwen3-8b", "llama-8b", "qwen3-30b-a3b")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--model", choices=MODELS, help="whose shapes (default: 125m on a CPU, else qwen3-8b)")
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 32], help="rows of a step")
    parser.add_argument("--context", type=count, default=1024, help="keys of each row, and tokens of a prompt")
    parser.add_argument("--seconds", type=finite, default=0.3, help="for each shape")
    parser.add_argument("--num-threads", type=count, help="on a CPU (default: all cores)")
    parser.add_argument("--check-only", action="store_true", help="correctness alone")
    parser.add_argument("--result-json", metavar="FILE", help="written after every operation")
